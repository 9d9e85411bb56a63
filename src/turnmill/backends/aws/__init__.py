"""The AWS backend: records in DynamoDB, queues in SQS, blobs and models in S3, alerts to SNS, metrics as EMF.

    deployment NAME        bucket, table of the deployment's records, topic of its alerts, log group of its metrics
    run stack <NAME>-<h>   the run's queues and their dead-letter queues, its table, the Lambda functions

Needs the extra: pip install 'turnmill[aws]'. Everything here reads region, credentials and endpoint as every AWS tool
does: from the environment, the shared configuration files, or the role of the machine.
"""
