"""`turnmill chat`: in a pipe, for one message, and in a terminal with its Ctrl-C and Ctrl-D."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.cli.terminal import turnmill_command
from turnmill import assets
from turnmill.errors import GenerationFailed
from turnmill.wiring.chatting import ChatSession
from turnmill.wiring.serving import find_model

MODEL = "wordle-tiny"
QUESTION = "Guess the five-letter word."
FEEDBACK = "a- b- c- d- e-"
PATIENCE_S = 40.0


def chat(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    command = turnmill_command("chat", MODEL, *arguments)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_a_pipe_gives_one_answer_a_line() -> None:
    lines = [QUESTION, "", FEEDBACK, "/reset", QUESTION, "/help", "/system You are brief.", QUESTION, "/quit", QUESTION]
    done = chat("--seed", "1", "--temperature", "0", text="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 4 and all(answers) and answers[0] == answers[2], "the same after /reset"
    assert done.stderr.count("a new conversation begins") == 2 and "/quit" in done.stderr


def test_one_prompt_gives_one_answer_and_a_seed_repeats_it() -> None:
    one, two = [chat("--prompt", QUESTION, "--seed", "3") for _ in range(2)]
    assert (one.returncode, one.stderr) == (0, "") and one.stdout == two.stdout and len(one.stdout.split()) == 1


def test_a_message_that_does_not_fit_is_an_error_and_not_an_answer() -> None:
    done = chat(text=(QUESTION + " ") * 100)
    assert done.returncode == 1 and "the conversation is full" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_bytes_that_are_no_text_are_an_error_and_no_traceback() -> None:
    for arguments, given in (
        ([], b"cr\xe4ne\n"),
        (["--prompt", os.fsdecode(b"\xff")], b""),
        (["--system", "\udcff"], b""),
    ):
        done = subprocess.run(
            turnmill_command("chat", MODEL, *arguments), input=given, capture_output=True, check=False
        )
        assert done.returncode == 1 and done.stderr == b"Error: the message is no valid UTF-8\n"


def test_what_names_no_model_is_refused(tmp_path: Path) -> None:
    command = turnmill_command("chat", "no-such-run", "--root", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no run in" in done.stderr and list(tmp_path.iterdir()) == []


def test_an_answer_that_is_stopped_or_refused_leaves_a_conversation_that_goes_on() -> None:
    session = ChatSession(find_model(Path("nowhere"), MODEL), temperature=None, seed=1)
    assert "".join(session.answer(QUESTION, lambda: True)) == ""
    assert "".join(session.answer(QUESTION))
    with pytest.raises(GenerationFailed, match="full"):
        list(session.answer(FEEDBACK * 100))
    assert "".join(session.answer(FEEDBACK))
    session.reset()
    assert "".join(session.answer(QUESTION))


class Terminal:
    """What is typed and shown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, *, again: str = "") -> None:
        """Until it is shown. `again` is typed every second: Ctrl-C in the moment in which Python's prompt begins to
        wait for a key is noticed with the next key only.
        """
        end = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if not select.select([self._fd], [], [], 1.0)[0]:
                os.write(self._fd, again.encode())
                continue
            try:
                self.shown += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the command ended: {self.shown}") from None


@contextmanager
def terminal(*arguments: str) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        turnmill_command("chat", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        # The terminal is its controlling one, so that Ctrl-C is a signal.
        start_new_session=True,
        preexec_fn=_take_terminal,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_keeps_a_conversation_through_ctrl_c_and_ends_with_ctrl_d(tmp_path: Path) -> None:
    with terminal(str(assets.model_folder(MODEL)), "--root", str(tmp_path), "--temperature", "0") as (screen, process):
        screen.wait_for("> ")
        screen.type(f"{QUESTION}\n")
        screen.wait_for("\n> ")
        # At the prompt it gives another one.
        screen.type("\x03")
        screen.wait_for("\n> ", again="\x03")
        screen.type(f"{FEEDBACK * 100}\n")
        screen.wait_for("the conversation is full")
        screen.wait_for("\n> ")
        screen.type(f"{FEEDBACK}\n")
        screen.wait_for("\n> ")
        screen.type("\x04")
        assert process.wait(timeout=PATIENCE_S) == 0
        assert "Traceback" not in screen.shown
