"""Blocking callers of an event loop's thread: closed while they wait, and in a forked process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from dagster_adjunct.resources.threads import LoopThread


async def answer() -> int:
    await asyncio.sleep(0.002)
    return 1


async def closing() -> None:
    pass


def test_callers_have_their_answers_however_often_it_is_closed_meanwhile() -> None:
    thread, answers = LoopThread("closed"), []

    def call() -> None:
        for _ in range(50):
            answers.append(thread.run(answer()))

    callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    while any(caller.is_alive() for caller in callers) and len(answers) < 200:
        thread.close(closing)
        callers[0].join(0.003)
    for caller in callers:
        caller.join(120)
    assert answers == [1] * 200
    thread.close(closing)
    thread.close(closing)


def test_a_handler_of_a_signal_may_close_it() -> None:
    thread = LoopThread("signalled")

    async def interrupted() -> int:
        signal.raise_signal(signal.SIGUSR1)
        await asyncio.sleep(0.2)
        return 2

    before = signal.signal(signal.SIGUSR1, lambda *_: thread.close(lambda: asyncio.sleep(0.3)))
    try:
        assert thread.run(interrupted()) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_process_begins_a_thread_of_its_own_and_leaves_its_parents_alone() -> None:
    thread = LoopThread("forked")
    assert thread.run(answer()) == 1
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        thread.close(closing)
        right = thread.run(answer()) == 1
        thread.close(closing)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert thread.run(answer()) == 1
    thread.close(closing)
