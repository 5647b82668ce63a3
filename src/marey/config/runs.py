"""Which schema an objective's configuration has, and which YAML holds its defaults."""

from __future__ import annotations

from marey.config.causal import CausalConfig
from marey.config.schema import EncoderConfig

RunConfig = EncoderConfig | CausalConfig
SCHEMAS: dict[str, type[EncoderConfig] | type[CausalConfig]] = {
    "invariance": EncoderConfig,
    "latent_video": CausalConfig,
}
DEFAULTS = {"invariance": "config", "latent_video": "causal_video"}
"""Objective -> the configuration whose values its recipes start from."""
RECIPE_GROUPS = {"invariance": "recipe", "latent_video": "causal_recipe"}
