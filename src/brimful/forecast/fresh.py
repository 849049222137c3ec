"""A function's call in a process of its own, so that nothing is left of the calls before it, not even after a crash."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# not forked: some package initialises CUDA when it is imported, and CUDA does not survive a fork
_CONTEXT = multiprocessing.get_context("spawn")


class Fresh:
    """A call under way; `connection` is readable when it has ended."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.connection, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_call, args=(theirs, function, args))
        self._process.start()
        theirs.close()

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.connection.poll()

    def result(self) -> dict[str, Any]:
        """What the function returned; `{"error": …, "trace": …}` where it raised or its process died."""
        try:
            found: dict[str, Any] = self.connection.recv()
        except EOFError:
            self._process.join()
            return {"error": f"the process died with exit code {self._process.exitcode}", "trace": ""}
        self._process.join()
        return found

    def stop(self) -> None:
        """End it, whatever it is doing."""
        self._process.terminate()
        self._process.join()


def call(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Wait for one call."""
    process = Fresh(function, *args)
    try:
        return process.result()
    except BaseException:
        process.stop()
        raise


def _call(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        found = function(*args)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2500:]}
    connection.send(found)
    connection.close()
