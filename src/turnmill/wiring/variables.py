"""Environment variables that tell a worker process what it may know; never arguments, which `ps` shows."""

WORKER_TOKEN = "TURNMILL_WORKER_TOKEN"
PROXY_URL = "TURNMILL_PROXY_URL"
WORKER_CONFIG = "TURNMILL_WORKER_CONFIG"
