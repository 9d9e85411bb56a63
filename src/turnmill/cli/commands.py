"""The root command."""

import click

from turnmill import __version__
from turnmill.cli.alerts import alerts
from turnmill.cli.chat import chat
from turnmill.cli.cleanup import cleanup
from turnmill.cli.conversations import conversations
from turnmill.cli.cost import cost
from turnmill.cli.data import data
from turnmill.cli.deploy import deploy
from turnmill.cli.dlq import dlq
from turnmill.cli.doctor import doctor
from turnmill.cli.env import env
from turnmill.cli.errors import SectionedGroup
from turnmill.cli.evaluations import evaluations
from turnmill.cli.external import external
from turnmill.cli.logs import logs
from turnmill.cli.queues import queues
from turnmill.cli.rescore import rescore_command
from turnmill.cli.retry import retry
from turnmill.cli.role import role
from turnmill.cli.run import demo, evaluate, resume, run
from turnmill.cli.serve import serve
from turnmill.cli.show import runs, status, watch
from turnmill.cli.tasks import tasks
from turnmill.cli.up import cancel, up, upload

SECTIONS = {
    "Train": (demo, data, env, run, up, upload, cancel, resume, retry, deploy, external),
    "Use what was trained": (evaluate, serve, chat),
    "Look": (runs, status, watch, evaluations, conversations, tasks, rescore_command, logs, queues, cost, alerts),
    "Put right": (doctor, dlq, cleanup),
    "Of processes": (role,),
}


@click.group(
    cls=SectionedGroup,
    sections={title: [command.name for command in commands] for title, commands in SECTIONS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 it failed while running, 2 what was given can't be used, 130 interrupted.",
)
@click.version_option(__version__, prog_name="turnmill")
def turnmill() -> None:
    """Multi-turn reinforcement learning for LLM agents, driven by events.

    `turnmill demo` is the shortest way to see it; COMMAND --help says more of each.
    """


for section in SECTIONS.values():
    for command in section:
        turnmill.add_command(command)
