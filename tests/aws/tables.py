"""Tables of records on an emulator, made as CloudFormation makes them from their description."""

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.records import table_properties


def create_table(clients: AwsClients, name: str, *, is_recoverable: bool = False) -> None:
    """Make an empty table; what CreateTable does not know of its properties is set afterwards."""
    properties = table_properties(is_recoverable=is_recoverable)
    ttl = properties.pop("TimeToLiveSpecification")
    backups = properties.pop("PointInTimeRecoverySpecification")
    clients.call_now("dynamodb", "create_table", TableName=name, **properties)
    clients.call_now("dynamodb", "update_time_to_live", TableName=name, TimeToLiveSpecification=ttl)
    clients.call_now("dynamodb", "update_continuous_backups", TableName=name, PointInTimeRecoverySpecification=backups)
