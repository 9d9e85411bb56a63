"""A role for the launcher's suite: started like any role, it does what the variable BEHAVE says."""

import os
import signal
import subprocess
import sys
import time


def main() -> None:
    behave = os.environ["BEHAVE"]
    print(f"started {' '.join(sys.argv[1:])} threads={os.environ['OMP_NUM_THREADS']}", flush=True)
    if behave == "crash":
        print("about to crash", flush=True)
        sys.exit(3)
    if behave == "end":
        sys.exit(0)
    if behave == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behave == "parent":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"grandchild {grandchild.pid}", flush=True)
    print("ready", flush=True)
    if behave == "orphan":
        sys.stdin.read()
        print("parent is gone", flush=True)
        sys.exit(0)
    time.sleep(600)


if __name__ == "__main__":
    main()
