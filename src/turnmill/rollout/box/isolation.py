"""What this machine can keep a box closed with, and the order for one.

    choose -> NAMESPACES | UID (root), BWRAP (any user, where bubblewrap works), NONE (only with --unsafe-env)

Each is tried out on the machine before it is relied upon: what a kernel, a container or a policy forbids is known by
trying only.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import turnmill
from turnmill.environment.registry import FoundEnvironment
from turnmill.errors import InvalidInput
from turnmill.rollout.box.order import HOME, LAYER, PACKAGE, Isolation, Limits, Order

# The interpreter leaves variables and the working folder out of its module path (-I), so it is told where Turnmill is.
_BOOT = (
    "import sys; sys.path[:0] = {first!r}; sys.path += {last!r}; from turnmill.rollout.box.{module} import main; main()"
)
# Parts of the system that programs need, where they are there.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_SYSTEM_FILES = ("/etc/localtime", "/etc/mime.types", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ssl")
_NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/ca-certificates", "/etc/pki")
# So many uids, at the upper end of those that there are, where nobody's are; in a user namespace there are fewer.
_NUM_UIDS = 256
_HIGHEST_UID = 0x7FFF0000
# What systems put at the end of a range of 65536.
_RESERVED_UIDS = 4096
_PROBE_S = 30.0
# Since this kernel RLIMIT_NPROC is about the processes of a user in their namespace.
_COUNTS_BY_NAMESPACE = (5, 14)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the boxes of one worker are made."""

    found: FoundEnvironment
    isolation: Isolation
    # Folder of what was installed for the environment's package, if anything was.
    layer: Path | None = None
    # Folders that hold what an environment must not see: the deployment's root.
    hidden: Sequence[Path] = ()
    # File for the output of the environment.
    log: Path
    limits: Limits = Limits()
    # The box may use the network, as for a judge that is called over it.
    has_network: bool = False
    # Seconds of one generation call.
    call_timeout_s: float
    # Seconds for loading; for which the event loop may be blocked.
    load_s: float = 120.0
    block_s: float = 60.0
    python: str = sys.executable
    # Further variables of the environment's process.
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def own_process_limit(self) -> int | None:
        """What the player limits its processes to: the kernel counts those of a user namespace, once it is in one."""
        is_counted = self.isolation is Isolation.BWRAP and _release() >= _COUNTS_BY_NAMESPACE
        return self.limits.num_processes if is_counted else None


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where things are, as a box sees them."""

    home: str
    package: str | None
    layer: str | None


def choose(*, is_unsafe_allowed: bool, python: str = sys.executable) -> Isolation:
    """The strongest isolation that works here.

    Raises `InvalidInput` where there is none, unless the user has said that the code may be trusted.
    """
    if sys.platform != "linux":
        raise InvalidInput(f"environment packages are played on Linux only, and this is {sys.platform}")
    candidates = [Isolation.NAMESPACES, Isolation.UID] if os.geteuid() == 0 else []
    if shutil.which("bwrap"):
        candidates.append(Isolation.BWRAP)
    troubles: list[str] = []
    for isolation in candidates:
        trouble = probe(isolation, python)
        if trouble is None:
            return isolation
        troubles.append(f"{isolation}: {trouble}")
    if is_unsafe_allowed:
        return Isolation.NONE
    tried = f" Tried: {'; '.join(troubles)}." if troubles else ""
    raise InvalidInput(
        "environment packages run in a box, and this machine has nothing to close one with: run Turnmill as root, or "
        f"install bubblewrap (bwrap).{tried} If you trust the package as you trust your own code, --unsafe-env runs it "
        "with limits only, and it can read what you can read."
    )


def probe(isolation: Isolation, python: str = sys.executable) -> str | None:
    """Why a box of this kind can't be made here; None: it can."""
    with open(os.devnull, "rb") as nothing:
        return _probe(isolation, python, nothing.fileno())


def _probe(isolation: Isolation, python: str, control_fd: int) -> str | None:
    order = Order(
        isolation=isolation,
        argv=[python, "-I", "-S", "-c", "pass"],
        environ=_environ({}),
        home="/",
        read_only=_view(None, None, has_network=False),
        hidden=[],
        limits=Limits(),
        control_fd=control_fd,
        bwrap=shutil.which("bwrap") or "",
        uids=uids(),
    )
    # A warden's standard input is also its life line, so it is held open.
    with subprocess.Popen(
        warden_command(python),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=order.environ,
        pass_fds=(control_fd,),
        start_new_session=True,
    ) as warden:
        assert warden.stdin is not None and warden.stdout is not None
        warden.stdin.write(order.to_line())
        warden.stdin.flush()
        try:
            code = warden.wait(_PROBE_S)
        except subprocess.TimeoutExpired:
            return f"no end within {_PROBE_S:g} s"
        finally:
            warden.stdin.close()
        text = warden.stdout.read().decode(errors="replace").strip()
    return None if code == 0 else text or f"exit code {code}"


def warden_command(python: str) -> list[str]:
    """It needs nothing but the standard library."""
    return [python, "-I", "-S", "-c", _boot("warden")]


def seen_from_outside(text: str, settings: Settings) -> str:
    """What a box says, with the paths of its own file tree as people here know them."""
    if settings.isolation.has_view:
        for inside, outside in ((PACKAGE, settings.found.folder), (LAYER, settings.layer)):
            if outside is not None:
                text = text.replace(inside, str(outside))
    return text


def places_of(settings: Settings, base: Path | None) -> Places:
    """`base` is the box's own folder on the machine, where it has no file tree of its own; copies what it must read.

    Raises `InvalidInput` for a package whose files its box can't read.
    """
    package, layer = settings.found.folder, settings.layer
    if settings.isolation is Isolation.NAMESPACES and package is not None:
        _check_readable(package)
    if settings.isolation.has_view:
        return Places(home=HOME, package=PACKAGE if package else None, layer=LAYER if layer else None)
    assert base is not None
    home = base / "home"
    home.mkdir(mode=0o700)
    if settings.isolation is Isolation.UID:
        # Others may pass, and read what is meant for them: the deployment's own folders are closed to them.
        base.chmod(0o711)
        package, layer = _copied(package, base / "package"), _copied(layer, base / "layer")
    return Places(home=str(home), package=str(package) if package else None, layer=str(layer) if layer else None)


def _check_readable(package: Path) -> None:
    for path in (package, *package.rglob("*")):
        wanted = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
        if not path.is_symlink() and path.stat().st_mode & wanted != wanted:
            raise InvalidInput(
                f"{path} can't be read by other users, and so not by its box, which is one: chmod -R a+rX {package}"
            )


def _copied(folder: Path | None, target: Path) -> Path | None:
    if folder is None:
        return None
    shutil.copytree(folder, target, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def order_of(settings: Settings, places: Places, *, base: Path | None, control_fd: int) -> Order:
    """The order for a box with `settings`; `base` is its own folder on the machine, where it has one."""
    return Order(
        isolation=settings.isolation,
        argv=[settings.python, "-I", "-B", "-c", _boot("player")],
        environ=_environ(settings.environ) | {"HOME": places.home, "TMPDIR": places.home},
        home=places.home,
        read_only=_view(settings.found.folder, settings.layer, has_network=settings.has_network),
        hidden=[os.path.realpath(path) for path in settings.hidden],
        limits=settings.limits,
        control_fd=control_fd,
        has_network=settings.has_network,
        bwrap=shutil.which("bwrap") or "",
        uids=uids() if settings.isolation.has_uid else (0, 0),
        base=str(base or ""),
    )


def uids(uid_map: Path = Path("/proc/self/uid_map")) -> tuple[int, int]:
    """First uid and number of those that boxes use: the end of what this user namespace has, at most _HIGHEST_UID."""
    end = 0
    for line in uid_map.read_text().splitlines():
        inside, _, count = map(int, line.split())
        end = max(end, inside + count)
    end = min(end - _RESERVED_UIDS, _HIGHEST_UID)
    return end - _NUM_UIDS, _NUM_UIDS


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    """A list of what is there; nothing of the worker's variables is handed on but the language and the time zone."""
    kept = {name: value for name in ("LANG", "LC_ALL", "TZ") if (value := os.environ.get(name))}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | threads | kept | dict(more)


def _view(package: Path | None, layer: Path | None, *, has_network: bool) -> list[tuple[str, str]]:
    """[real path, path in the box] of what a box with a file tree of its own sees."""
    paths = {*_SYSTEM, *_SYSTEM_FILES, *(_NETWORK_FILES if has_network else ())}
    paths |= {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(turnmill.__file__).parent)}
    paths |= {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_package_folders()}
    # A link to the interpreter leads somewhere.
    paths.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    shown = [(os.path.realpath(path), path) for path in sorted(paths) if os.path.exists(path)]
    if package is not None:
        shown.append((os.path.realpath(package), PACKAGE))
    if layer is not None:
        shown.append((os.path.realpath(layer), LAYER))
    return shown


def _boot(module: str) -> str:
    first = [str(Path(turnmill.__file__).parent.parent)]
    return _BOOT.format(first=first, last=_package_folders(), module=module)


def _package_folders() -> list[str]:
    """Where packages are installed for this interpreter, also those that it has from another one."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(folders))
