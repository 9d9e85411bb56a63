"""Deleting all that a bucket holds below a prefix: every version, every marker of a deletion, every part."""

from contextlib import suppress
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import BackendUnavailable, InvalidInput

# What one request deletes.
_BATCH = 1000


async def delete_objects(clients: AwsClients, bucket: str, prefix: str = "") -> int:
    """How many versions and markers were deleted; none where the bucket isn't there.

    What is written meanwhile may stay. Raises `InvalidInput` for missing rights.
    """

    def work(client: Any) -> int:
        num_deleted = 0
        pages = client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix, MaxKeys=_BATCH)
        for page in pages:
            found = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            if found:
                objects = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in found]
                answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
                _check(bucket, answer.get("Errors", []))
                num_deleted += len(objects)
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", []):
                # Gone since: completed, aborted by another one or by this, whose answer was lost.
                with suppress(client.exceptions.NoSuchUpload):
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return num_deleted

    try:
        return await clients.run(lambda: clients.work_with("s3", "delete_objects", work))
    except Refused as refused:
        if refused.code in ("NoSuchBucket", "404"):
            return 0
        raise InvalidInput(f"the bucket {bucket} can't be emptied: {refused}") from refused


def _check(bucket: str, errors: list[dict[str, Any]]) -> None:
    if errors:
        first = errors[0]
        raise BackendUnavailable(
            f"{len(errors)} objects of the bucket {bucket} can't be deleted, "
            f"{first.get('Key')} among them: {first.get('Code')} {first.get('Message', '')}"
        )
