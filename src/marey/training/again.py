"""The command that goes on with a run: printed when it stops, kept in its receipt for when it could not say it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marey.core.commands import override_word
from marey.core.errors import UserError

_KEY = re.compile(r"^[+~]*([^=\s]+?)(?:@[^=]*)?=")
# What a stop and a start replace: where to go on from, and the folder to go on in.
_START = ("resume.ckpt_path", "resume.weights_only", "resume.weights", "resume.allow_changes", "resume")
_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode")


@dataclass(frozen=True)
class Again:
    """How a run was started, as far as starting it again needs it.

    program: words before the overrides, ``--config-name`` included. overrides: as they were typed. folder: where
    they were typed, which relative paths are read from.
    """

    program: Sequence[str]
    overrides: Sequence[str]
    folder: Path
    run_dir: Path

    def command(self, checkpoint: Path | None) -> str | None:
        """One line for a shell, valid in any folder; without a checkpoint it starts from the same place again.

        None where a path holds what the configuration's grammar cannot carry.
        """
        own = _HYDRA if checkpoint is None else (*_HYDRA, *_START)
        words = [word for word in self.overrides if _key(word) not in own]
        try:
            last = [override_word("hydra.run.dir", str(self.run_dir))]
            if checkpoint is not None:
                start = override_word("resume.ckpt_path", str(checkpoint))
                last = [start, "resume.weights_only=false", *last]
        except UserError:
            return None
        line = " ".join([*(shlex.quote(word) for word in [*self.program, *words]), *last])
        return f"cd {shlex.quote(str(self.folder))} && {line}"


def typed_program(argv: Sequence[str], orig_argv: Sequence[str] = sys.orig_argv) -> list[str]:
    """The words that start this program again: ``marey train``, ``python -m marey train``, ``python main.py``.

    argv: ``sys.argv`` as it was typed. A script is named by its absolute path, since the command may be typed
    elsewhere, unless the shell finds this very ``marey`` by its name.
    """
    script = Path(argv[0])
    train = ["train"] if "train" in argv[1:2] else []
    if script.name == "marey":
        found = shutil.which("marey")
        same = found is not None and os.path.realpath(found) == os.path.realpath(script)
        return ["marey" if same else str(script.absolute()), *train]
    if script.name == "__main__.py" and "-m" in orig_argv:
        # What python was told besides (-P, -X ...) stays.
        end = orig_argv.index("-m")
        return [sys.executable, *orig_argv[1:end], "-m", "marey", *train]
    return [sys.executable, str(script.absolute()), *train]


def launcher_note(environment: Mapping[str, str] = os.environ) -> str | None:
    """What the command cannot say: that a launcher was in front of it."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "under torchrun, as before"
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return "under srun, as before"
    return None


def _key(word: str) -> str | None:
    match = _KEY.match(word)
    return match[1] if match else None
