"""`turnmill role`: what the launcher starts; of use by hand only to look at one role alone."""

from pathlib import Path

import click

from turnmill.wiring.roles import ROLES, run_role


@click.command(hidden=True)
@click.argument("role_name", metavar="ROLE", type=click.Choice(ROLES))
@click.option("--root", type=click.Path(path_type=Path), required=True, help="Folder of the deployment.")
@click.option("--run", "run_id", required=True, help="Run id.")
@click.option("--name", required=True, help="Name of this process within the run.")
def role(role_name: str, root: Path, run_id: str, name: str) -> None:
    """Run one role process of a run."""
    run_role(role_name, root=root, run_id=run_id, name=name)
