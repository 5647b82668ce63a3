"""Composing and checking the configuration: the reference values, and refusals that name the nearest key."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel

from marey.config import compose
from marey.config.causal import CausalConfig
from marey.config.schema import EncoderConfig, describe
from marey.core.errors import UserError

REFERENCE: dict[str, Any] = {
    "frame_stride": 2,
    "accumulate_grad_batches": 2,
    "seed": 0,
    "on_nonfinite": "stop",
    "loader": {
        "batch_size": 96, "micro_batch_size": None, "timeout": 600, "num_workers": 12, "persistent_workers": True,
        "prefetch_factor": 2, "pin_memory": True, "clips_per_video": 200, "normalize_on_gpu": True,
        "episode_distinct": True,
    },
    "augmentation": {
        "local_size": 96, "local_crops_number": 10, "local_crops_scale": [0.02, 0.4],
        "global_crops_scale": [0.8, 1.0], "hflip": True, "color_jitter_prob": 0.8, "grayscale_prob": 0.2,
        "gaussian_blur_prob": 0.0, "color_jitter_hue": 0.1, "sparse": True,
    },
    "model": {
        "name": "vit_base", "img_size": 224, "patch_size": 16, "num_frames": 16, "tubelet_size": 1, "use_rope": True,
        "token_drop_rate": 0.95, "token_drop_mode": "random", "attn_mode": "block_causal", "rope_layout": "tiled",
    },
    "projector": {"hidden_dim": 2048, "output_dim": 256, "norm_group": None},
    "optimizer": {
        "type": "AdamW", "lr": 4e-4, "weight_decay": 0.04, "exclude_bias_norm": True, "betas": [0.9, 0.95],
    },
    "scheduler": {
        "name": "LinearWarmupCosineAnnealing", "interval": "step", "peak_step": 1200, "start_lr": 1e-4, "end_lr": 4e-4,
    },
    "weight_decay_scheduler": {"enabled": False, "schedule_type": "cosine", "start_value": 0.04, "end_value": 0.4},
    "ema": {
        "enabled": True, "decay": 0.9999, "update_every": 32, "start_step": 0, "compensate": True,
        "include": ["encoder"], "save_key": "state_dict_ema", "dtype": "float32",
    },
    "loss": {"sigreg": {"weight": 0.02, "kwargs": {"knots": 17, "num_proj": 1024, "normalize_by_n": False}}},
    "checkpoint": {
        "dirpath": "checkpoints", "filename": "epoch-{epoch:04d}", "every_n_train_steps": 2000, "save_top_k": -1,
        "save_last": True, "auto_insert_metric_name": False,
    },
    "resume": {"ckpt_path": None, "weights_only": True, "weights": "online", "allow_changes": []},
    "wandb": {"enabled": False},
}  # fmt: skip
TRAINER = {
    "max_epochs": 26, "accelerator": "auto", "max_steps": -1, "devices": 8, "num_nodes": 2, "strategy": "ddp",
    "precision": "bf16-mixed", "num_sanity_val_steps": 0, "limit_train_batches": 1.0, "limit_val_batches": 0,
    "log_every_n_steps": 10,
}  # fmt: skip
RECIPES = ["walking_tours_vitb", "k710_control", "consumer_vit_tiny", "videomix_vitl", "smoke", "demo"]


def assert_contains(found: dict[str, Any], wanted: dict[str, Any], where: str = "") -> None:
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_contains(found[key], value, f"{where}{key}.")
        else:
            assert found[key] == value, f"{where}{key}"


def test_the_default_is_the_published_recipe_value_by_value() -> None:
    assert_contains(compose.compose_container([]), {**REFERENCE, "trainer": TRAINER})


def test_training_and_validation_data_are_the_same_by_default() -> None:
    data = compose.compose_container([])["data"]
    assert data["train"] == data["val"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_says_what_it_may_claim(recipe: str) -> None:
    config = compose.load_config([f"recipe={recipe}"])
    assert config.recipe.name == recipe
    assert config.recipe.claims
    assert config.recipe.not_public


def test_data_can_be_chosen_beside_a_recipe() -> None:
    config = compose.load_config(["recipe=smoke", "data=custom", "data.train=videos"])
    assert (config.data.train, config.data.val) == ("videos", None)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("words", "data"),
    [
        (["data=demo"], {"name": "demo", "train": "demo:train", "val": "demo:heldout"}),
        (["data=custom", "data.train=videos"], {"name": "custom", "train": "videos", "val": None}),
    ],
)
def test_data_that_is_asked_for_wins_over_the_recipes(
    recipe: str, order: int, words: list[str], data: dict[str, Any]
) -> None:
    config = compose.load_config([f"recipe={recipe}", *words][::order])
    assert config.recipe.name == recipe
    assert {key: getattr(config.data, key) for key in data} == data
    assert config.data.num_episodes is None


def test_every_recipe_brings_its_own_data() -> None:
    names = {recipe: compose.load_config([f"recipe={recipe}"]).data.name for recipe in RECIPES}
    assert names == {
        "walking_tours_vitb": "walking_tours",
        "k710_control": "k710_20_percent",
        "consumer_vit_tiny": "walking_tours_8",
        "videomix_vitl": "videomix",
        "smoke": "demo",
        "demo": "demo",
    }


@pytest.mark.parametrize(("words", "follows"), [([], False), (["hydra.job.chdir=true"], True)])
def test_a_job_says_whether_it_works_in_its_run_folder(words: list[str], follows: bool) -> None:
    assert compose.compose_job(words).follows_run_dir is follows


@pytest.mark.parametrize("override", ["optimizer.lr=1", "trainer.limit_train_batches=1.0", "loss.sigreg.weight=0"])
def test_a_whole_number_may_stand_for_a_real_one(override: str) -> None:
    compose.load_config([override])


def models(schema: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, field in schema.model_fields.items():
        kind = field.annotation
        nested = next((k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)), None)
        keys |= models(nested, f"{prefix}{name}.") if nested is not None else {f"{prefix}{name}"}
    return keys


def test_yaml_and_schema_declare_the_same_keys() -> None:
    assert {key for key, _ in compose.flatten(compose.compose_container([]))} == models(EncoderConfig)


def test_composed_configurations_survive_a_round_trip() -> None:
    config = compose.load_config([])
    assert compose.validate(describe(config)) == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.nmae=vit_tiny", "model.nmae is not a key of the configuration; did you mean model.name?"),
        ("lr=1", "did you mean optimizer.lr?"),
        ("max_steps=1", "did you mean trainer.max_steps?"),
        ("+mpl_ratio=1", "mpl_ratio is not a key"),
        ("+model.nmae=vit_tiny", "did you mean model.name?"),
        ("+seed=1", "without the leading +"),
        ("model.name=vit_tini", "did you mean vit_tiny?"),
        ("recipe=smok", "did you mean recipe=smoke?"),
        ("data=walkingtours", "did you mean data=walking_tours?"),
        ("loader.batch_size=0", "loader.batch_size=0 is not allowed"),
        ("loader.batch_size=many", "loader.batch_size=many is not allowed"),
        ("loader.batch_size=true", "loader.batch_size=true is not allowed: it must be a valid integer"),
        ("loader.batch_size=8.0", "loader.batch_size=8.0 is not allowed"),
        ("optimizer.lr=true", "optimizer.lr=true is not allowed"),
        ("optimizer.betas=[true,0.9]", "optimizer.betas[0]=true is not allowed"),
        ("loader.pin_memory=1", "loader.pin_memory=1 is not allowed"),
        ("trainer.limit_train_batches=true", "trainer.limit_train_batches=true is not allowed"),
        ("trainer.limit_train_batches=1.5", "trainer.limit_train_batches=1.5 is not allowed"),
        ("trainer.limit_val_batches=-1", "trainer.limit_val_batches=-1 is not allowed"),
        ("trainer.overfit_batches=2.5", "trainer.overfit_batches=2.5 is not allowed"),
        ("trainer.max_epochs=-7", "it must be greater than or equal to -1"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval=0 is not allowed"),
        ("trainer.val_check_interval=1.5", "trainer.val_check_interval=1.5 is not allowed"),
        ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 is not allowed"),
        ("loader.micro_batch_size=7", "must divide loader.batch_size=96"),
        ("projector.norm_group=7", "projector.norm_group=7 must divide"),
        ("model.img_size=225", "not a multiple of model.patch_size"),
        ("augmentation.local_size=97", "augmentation.local_size=97"),
        ("augmentation.local_crops_scale=[0.5, 0.1]", "0 < low <= high"),
        ("trainer.accumulate_grad_batches=4", "use the top-level accumulate_grad_batches"),
        ("trainer.sync_batchnorm=true", "projector.norm_group"),
        ("on_nonfinite=ignore", "'stop' or 'skip'"),
        ("model=3", "model.KEY=VALUE"),
        ("~model.name", "model.name is missing"),
        ("data=custom", "data.train has no value"),
        ("data.train=[]", "data.train"),
        ("data.train=[{path: a, clip_per_video: 2}]", "did you mean data.train[0].clips_per_video?"),
        ("data.train=[{path: a, clips_per_video: 0}]", "data.train[0].clips_per_video=0 is not allowed"),
        ("not an override", "cannot read the override"),
    ],
)
def test_a_refusal_names_the_key_and_what_to_do(override: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose.load_config([override])
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_differences_name_the_key_the_value_and_the_recipes() -> None:
    ours = compose.compose_container(["recipe=smoke", "optimizer.lr=1e-3", "data.train=x"])
    theirs = compose.compose_container(["recipe=smoke"])
    assert compose.differences(ours, theirs) == [
        "data.train=x (recipe: demo:train)",
        "optimizer.lr=0.001 (recipe: 0.0004)",
    ]


def test_only_recipe_and_data_choices_are_group_overrides() -> None:
    assert compose.group_overrides(["recipe=smoke", "optimizer.lr=1", "data=demo", "data.train=x"]) == [
        "recipe=smoke",
        "data=demo",
    ]


def test_the_objective_chooses_the_schema() -> None:
    assert isinstance(compose.load_run([]), EncoderConfig)
    assert isinstance(compose.load_run(["data=demo"], config_name="causal_video"), CausalConfig)


def test_a_causal_run_differs_from_its_own_recipe_and_not_by_its_data() -> None:
    overrides = ["data=demo", "causal_recipe=long", "optimizer.lr=1e-3"]
    config = compose.load_run(overrides, config_name="causal_video")
    recipe = compose.load_recipe(config, overrides)
    assert recipe.recipe.name == "causal_long"
    assert compose.differences(describe(config), describe(recipe)) == ["optimizer.lr=0.001 (recipe: 0.0003)"]


def test_causal_yaml_and_schema_declare_the_same_keys() -> None:
    found = {key for key, _ in compose.flatten(compose.compose_container([], config_name="causal_video"))}
    assert found == models(CausalConfig)
