"""What a warden is told: one line of JSON on its standard input."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

# Where a box with a file tree of its own finds the environment; its temporary folder.
PACKAGE, LAYER, HOME = "/environment/package", "/environment/site-packages", "/tmp"
# The descriptor of the control socket in the player.
CONTROL_FD = 3
# How a warden ends that could not make its box, having said why on standard error; and one that could not empty it.
EXIT_REFUSED, EXIT_NOT_EMPTY = 125, 126


class Isolation(StrEnum):
    """What keeps a box closed, strongest first."""

    # Root with the right to make namespaces: own uid, processes, files and network.
    NAMESPACES = "namespaces"
    # A user namespace through bubblewrap: own processes, files and network, but the worker's own uid.
    BWRAP = "bwrap"
    # Root without that right (most containers): another uid.
    UID = "uid"
    # Limits only; the user has said that the code is to be trusted.
    NONE = "none"

    @property
    def has_view(self) -> bool:
        """The box sees a file tree of its own."""
        return self in (Isolation.NAMESPACES, Isolation.BWRAP)

    @property
    def has_uid(self) -> bool:
        return self in (Isolation.NAMESPACES, Isolation.UID)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one box may use."""

    # MiB of memory: private memory of one process (the kernel refuses more), and resident memory of all together.
    memory_mb: int = 4096
    # Processes and threads.
    num_processes: int = 128
    # Open files of one process.
    num_files: int = 1024
    # MiB of files in its temporary folder.
    temp_mb: int = 256
    # Processor seconds of one process.
    cpu_s: int = 24 * 3600
    # MiB of output after which a box is ended; of what came before, the log keeps the last few.
    output_mb: int = 256


@dataclass(frozen=True, kw_only=True)
class Order:
    """How to make one box."""

    isolation: Isolation
    argv: list[str]
    environ: dict[str, str]
    # Its working and temporary folder, where it has no file tree of its own.
    home: str
    # Files and folders that it sees, [real path, path in the box], where it has a file tree of its own.
    read_only: list[tuple[str, str]]
    # Folders that it must not read.
    hidden: list[str]
    limits: Limits
    # Descriptor of the control socket as the warden inherits it.
    control_fd: int
    has_network: bool = False
    # Its own folder on the machine, removed with it; "" where it has a file tree of its own.
    base: str = ""
    # The program, for isolation by bwrap.
    bwrap: str = ""
    # First uid and number of uids to choose from.
    uids: tuple[int, int] = field(default=(0, 0))

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Order":
        fields = json.loads(line)
        fields["isolation"] = Isolation(fields["isolation"])
        fields["limits"] = Limits(**fields["limits"])
        fields["read_only"] = [tuple(pair) for pair in fields["read_only"]]
        fields["uids"] = tuple(fields["uids"])
        return cls(**fields)
