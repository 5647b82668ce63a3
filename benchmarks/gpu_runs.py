"""Whole runs of ``gpu.py``: killed after every step and resumed, they end bit for bit as the run nobody stopped."""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu_rows import Found, Place, Row
from gpu_timings import write_store
from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, load_config, validate
from marey.config.runs import RunConfig


def shared(place: Place) -> list[str]:
    """The device, deterministic there, and nothing written that is not compared."""
    return [
        f"trainer.accelerator={'gpu' if place.on_cuda else 'cpu'}",
        "trainer.deterministic=true",
        "trainer.devices=1",
        "trainer.max_epochs=-1",
        f"trainer.max_steps={2 if place.small else 3}",
        "trainer.logger=false",
        "trainer.enable_progress_bar=false",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1",
        "loader.num_workers=0",
        "accumulate_grad_batches=2",
        "ema.enabled=true",
        "ema.update_every=2",
    ]


def encoder_run(folder: Path, place: Place) -> RunConfig:
    """ViT-nano on a store of 24 episodes; bf16-mixed on CUDA, where it is the rule."""
    write_store(folder / "frames.lance", episodes=24, frames=10, height=40, width=40)
    return load_config(
        [
            "recipe=smoke",
            "data=custom",
            f"data.train={folder / 'frames.lance'}",
            "model.img_size=32",
            "model.num_frames=4",
            "augmentation.local_size=16",
            "loader.batch_size=4",
            "loader.micro_batch_size=2",
            f"trainer.precision={'bf16-mixed' if place.on_cuda else '32-true'}",
            *shared(place),
        ]
    )


def causal_run(folder: Path, place: Place) -> RunConfig:
    """A packed causal run on 24 latents of four lengths, with the mask-based kernel on CUDA."""
    rng = np.random.default_rng(0)
    rows = ["clip_id,path,length_frames,height,width,fps,text"]
    for i in range(24):
        frames = (3, 5, 8, 9)[i % 4]
        np.save(folder / f"{i}.npy", rng.standard_normal((3, frames, 16, 16)).astype(np.float32))
        rows.append(f"{i},{i}.npy,{frames},16,16,4.0,clip {i}")
    (folder / "latents.csv").write_text("\n".join(rows) + "\n")
    overrides = [
        f"data.train={folder / 'latents.csv'}",
        "data.buckets=[[1,2],[1,4],[2,6]]",
        "data.batching.mode=packed",
        "data.train_batch_size=3",
        "model.hidden=64",
        "model.layers=2",
        "model.heads=2",
        "model.patch=2",
        "trainer.precision=32-true",
        *shared(place),
    ]
    return validate(compose_container(overrides, config_name="causal_video"), CausalConfig)


def exact_resume(place: Place, *, kind: str) -> Found:
    """Restored after every step; weights, optimizer, average, records and counts are compared by their bits."""
    from marey.training.verify import assert_resumes_exactly  # Lightning takes many seconds to import

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"encoder": encoder_run, "causal": causal_run}[kind](folder, place)
        try:
            done = assert_resumes_exactly(config, folder / "runs")
        except AssertionError as error:
            return Found({"differs": " ".join(str(error).split())[:300]}, False)
        finally:
            # Lightning leaves it on for the process, and every row after this one would be slower for it.
            torch.use_deterministic_algorithms(False)
    return Found({"steps": done.steps, "restored at": done.steps - 1}, True)


RUNS: list[Row] = [
    Row("exact resume, causal packed", partial(exact_resume, kind="causal"), 70),
    Row("exact resume, encoder", partial(exact_resume, kind="encoder"), 60),
]
