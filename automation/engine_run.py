"""The Automation API over this project: its engine as a process that can be stopped, and the stack it works on."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping

from pulumi.automation import CommandError as EngineError
from pulumi.automation import LocalWorkspace, PulumiCommand, Stack
from pulumi.automation._cmd import CommandResult
from pulumi.automation.errors import create_command_error

from automation.stack_file import PROJECT
from automation.stopping import Stopper
from spark_core.errors import SparkError

__all__ = ["Engine", "EngineError", "Workspace", "open_stack"]


class Engine(PulumiCommand):
    """The engine that ``. ./env`` puts on the PATH, in a session of its own.

    Its output goes to files, not pipes: an engine that outlives this command can then still end in good order, which it
    does at once, since the kernel interrupts it when this command dies.

    Args:
        stopper: What interrupts it.
        tick: Called a few times a second while it runs.
    """

    def __init__(self, stopper: Stopper, tick: Callable[[], None] = lambda: None) -> None:
        try:
            super().__init__()
        except (FileNotFoundError, subprocess.CalledProcessError):
            raise SparkError("expected pulumi on the PATH, found none", do="run `. ./env` first") from None
        self._stopper = stopper
        self._tick = tick

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], object] | None = None,
        on_error: Callable[[str], object] | None = None,
    ) -> CommandResult:
        """Run it to its end; raises the Automation API's errors."""
        self._stopper.check()
        words = args if "--non-interactive" in args else ["--non-interactive", *args]
        # The launcher (toolchain/launcher.py) sees to it that the engine is interrupted when this process dies.
        ours = {"PULUMI_AUTOMATION_API": "true", "SPARK_VLLM_INTERRUPT_WITH": str(os.getpid())}
        environment = {**os.environ, **additional_env, **ours}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                [self.command, *words],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code = self._stopper.follow(process, self._tick)
            texts = []
            for file, say in ((out, on_output), (err, on_error)):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").rstrip("\n"))
                if say is not None:
                    for line in texts[-1].splitlines():
                        say(line)
        result = CommandResult(stdout=texts[0], stderr=texts[1], code=code)
        if code != 0:
            raise create_command_error(result)
        return result


class Workspace(LocalWorkspace):
    """This project's folder; a stack is named with every operation, so the person's selection stays as it is."""

    def select_stack(self, stack_name: str) -> None:
        """Nothing is to be selected."""


def open_stack(name: str, engine: Engine) -> Stack:
    """A stack of this project, whether or not it exists."""
    return Stack.select(name, Workspace(work_dir=str(PROJECT), pulumi_command=engine))
