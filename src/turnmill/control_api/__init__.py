"""The HTTP interface of a deployment that is up: what there is, what to do with it, and its figures for Prometheus.

    request -> Guard (host, token, size) -> route -> wiring.reading | queues | alarms | cancelling, bucket | exposition

Everything but `/healthz` needs the deployment's token. It listens on 127.0.0.1, and says where in ROOT/control.json.
"""
