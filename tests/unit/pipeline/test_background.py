"""Work that outlasts a poll: begun once, its end told once, and begun anew after a failure."""

import asyncio

import pytest

from turnmill.errors import BackendUnavailable
from turnmill.pipeline.background import Background


async def test_work_is_begun_once_and_begun_anew_after_a_failure() -> None:
    background, go_on, begun = Background(), asyncio.Event(), list[int]()

    async def work() -> str:
        begun.append(len(begun))
        await go_on.wait()
        if len(begun) == 1:
            raise BackendUnavailable("the disk is full")
        return "done"

    assert await background.result_of("copy", work) is None
    assert await background.result_of("copy", work) is None and begun == [0]
    go_on.set()
    with pytest.raises(BackendUnavailable):
        await background.result_of("copy", work)
    assert await background.result_of("copy", work) == "done" and begun == [0, 1]


async def test_closing_ends_what_is_under_way() -> None:
    background, ended = Background(), asyncio.Event()

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    assert await background.result_of("copy", work) is None
    await background.close()
    assert ended.is_set()
    await background.close()
