"""The root command."""

import click

from turnmill import __version__
from turnmill.cli.alerts import alerts
from turnmill.cli.chat import chat
from turnmill.cli.cleanup import cleanup
from turnmill.cli.cost import cost
from turnmill.cli.data import data
from turnmill.cli.dlq import dlq
from turnmill.cli.doctor import doctor
from turnmill.cli.errors import SuggestingGroup
from turnmill.cli.logs import logs
from turnmill.cli.queues import queues
from turnmill.cli.retry import retry
from turnmill.cli.role import role
from turnmill.cli.run import demo, evaluate, resume, run
from turnmill.cli.serve import serve
from turnmill.cli.show import runs, status, watch
from turnmill.cli.up import cancel, up, upload


@click.group(cls=SuggestingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="turnmill")
def turnmill() -> None:
    """Multi-turn reinforcement learning for LLM agents, driven by events."""


for command in (
    *(demo, up, upload, run, cancel, resume, retry, evaluate, serve, chat),
    *(runs, status, watch, doctor, logs, queues, alerts, dlq, cost, cleanup, data, role),
):
    turnmill.add_command(command)
