"""What there is to measure: the one table that ``python -m benchmarks`` goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script of this folder. Each takes ``--json FILE`` and prints its table; ``--quick`` makes it short."""

    name: str
    """of the script, without ``.py``"""
    about: str
    """what it holds against what"""
    quick: tuple[str, ...] = ("--quick",)
    """what the quick run adds"""
    arguments: tuple[str, ...] = ()
    """what the thorough run adds"""
    cuda: bool = False
    """whether it measures nothing without a CUDA device"""
    apart: str = ""
    """why it is not part of ``all``"""
    command: str = ""
    """how it is run instead, where it takes other options than the rest"""

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.py"


BENCHMARKS = (
    Benchmark(name="startup", about="seconds before a command does what it was asked, against bare imports"),
    Benchmark(name="encoder_step", about="encoder step against its matrix products", arguments=("--plain",)),
    Benchmark(name="growth", about="encoder step and packed causal step against tokens, beside the floor's growth"),
    Benchmark(name="memory", about="peak memory against clips; bytes kept a token and layer, against arithmetic"),
    Benchmark(name="loader", about="clips a second and core, stage by stage"),
    Benchmark(name="reads", about="random clip reads against the JPEG decoder alone"),
    Benchmark(name="ingest", about="ingest against the decoder alone, and against workers"),
    Benchmark(name="batching", about="batching modes against one sample at a time", arguments=("--repeats", "3")),
    Benchmark(name="packing", about="token budgets filled, and work spread over ranks"),
    Benchmark(name="planner", about="planning and the first batch against clips"),
    # In eight minutes as it is.
    Benchmark(name="gpu", about="checks and timings of everything that has a CUDA path", quick=(), cuda=True),
    Benchmark(
        name="findings",
        about="published findings in miniature",
        apart="an experiment of hours, not speed",
        command="python benchmarks/findings.py --seeds 5 --jobs 2 --out findings",
    ),
    Benchmark(
        name="chaos",
        about="runs killed and resumed against one untouched",
        apart="reliability, not speed",
        command="python benchmarks/chaos.py --kills 50 --seed 0",
    ),
    Benchmark(
        name="damaged_videos",
        about="damaged files through ingest, against what was damaged",
        apart="reliability, not speed",
        command="python benchmarks/damaged_videos.py --files 500 --seed 0",
    ),
)
