from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from marey.core.errors import UserError
from marey.core.pixelstats import normalize_patches
from marey.core.tokens import TokenGroup, grid_positions, patchify
from marey.models.vit import VisionTransformer, build_encoder
from tests.models.samples import encoder, group, kept_tokens, model_config

LAYOUTS = ("tiled", "rotary")


def published_shapes(width: int, depth: int, *, patch: int, tubelet: int) -> dict[str, list[int]]:
    """Names and shapes of a published encoder file, without its ``encoder.`` prefix."""
    shapes = {"cls_token": [1, 1, width], "norm.weight": [width], "norm.bias": [width]}
    shapes |= {"patch_embed.proj.weight": [width, 3, tubelet, patch, patch], "patch_embed.proj.bias": [width]}
    for i in range(depth):
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            shapes |= {f"blocks.{i}.{name}.weight": [rows, columns], f"blocks.{i}.{name}.bias": [rows]}
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{name}.weight": [width], f"blocks.{i}.{name}.bias": [width]}
    return shapes


def test_vit_large_has_the_published_names_shapes_and_count() -> None:
    with torch.device("meta"):
        model = build_encoder(model_config(name="vit_large", patch_size=16, img_size=224), seed=0)
    state = model.state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == published_shapes(1024, 24, patch=16, tubelet=1)
    assert len(state) == 293
    assert sum(value.numel() for value in state.values()) == 303_099_904


@pytest.mark.parametrize("use_rope", [True, False])
def test_a_file_with_the_published_names_loads_strictly(use_rope: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"encoder.{name}": torch.randn(shape, generator=generator)
        for name, shape in published_shapes(128, 4, patch=8, tubelet=2).items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    model = build_encoder(model_config(tubelet_size=2, use_rope=use_rope), seed=0)
    loaded = load_file(tmp_path / "model.safetensors")
    model.load_state_dict({k.removeprefix("encoder."): v for k, v in loaded.items()}, strict=True)
    assert torch.equal(model.blocks[3].mlp.fc2.weight, weights["encoder.blocks.3.mlp.fc2.weight"])


def test_patch_embedding_is_the_convolution_its_weight_describes() -> None:
    model = encoder(tubelet_size=2)
    video = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = patchify(video, patch=8, tubelet=2)
    convolved = model.patch_embed.proj(video).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.patch_embed(patches), convolved, rtol=0, atol=1e-12)


def slow_encoder(model: VisionTransformer, patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One sequence ``[K, P]`` -> ``[1+K, D]``, with explicit softmax, mask and per-token rotation."""
    from tests.models.test_rope import turned_slowly

    p = model.state_dict()
    d, heads = model.embed_dim, model.num_heads
    per = d // heads
    norm = torch.nn.functional.layer_norm
    x = patches @ p["patch_embed.proj.weight"].reshape(d, -1).T + p["patch_embed.proj.bias"]
    x = torch.cat((p["cls_token"][0], x))
    frames = [None, *positions[:, 0].tolist()]
    for i in range(model.depth):
        w = {k.removeprefix(f"blocks.{i}."): v for k, v in p.items() if k.startswith(f"blocks.{i}.")}
        h = norm(x, (d,), w["norm1.weight"], w["norm1.bias"], 1e-6)
        q, k, v = (h @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]).split(d, dim=1)
        out = torch.zeros_like(h)
        for head in range(heads):
            cut = slice(head * per, (head + 1) * per)
            rows = []
            for part in (q, k):
                turned = [part[0, cut].tolist()] + [
                    turned_slowly(part[1 + j, cut].tolist(), tuple(where), model.rope_layout)
                    for j, where in enumerate(positions.tolist())
                ]
                rows.append(torch.tensor(turned, dtype=torch.float64))
            scores = rows[0] @ rows[1].T / math.sqrt(per)
            if model.attn_mode == "block_causal":
                for a in range(1, len(frames)):
                    for b in range(len(frames)):
                        if b == 0 or frames[b] > frames[a]:
                            scores[a, b] = -math.inf
            out[:, cut] = scores.softmax(dim=1) @ v[:, cut]
        x = x + out @ w["attn.proj.weight"].T + w["attn.proj.bias"]
        h = norm(x, (d,), w["norm2.weight"], w["norm2.bias"], 1e-6)
        h = h @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]
    return norm(x, (d,), p["norm.weight"], p["norm.bias"], 1e-6)


@pytest.mark.parametrize("attn_mode", ["full", "block_causal"])
@pytest.mark.parametrize("rope_layout", LAYOUTS)
def test_the_encoder_equals_its_formula(attn_mode: str, rope_layout: str) -> None:
    model = encoder(attn_mode=attn_mode, rope_layout=rope_layout)
    tokens = group(2, (4, 4, 4), 9)
    with torch.no_grad():
        (fast,) = model.encode_groups([tokens])
    for i in range(2):
        slow = slow_encoder(model, tokens.patches[i], tokens.positions[i])
        torch.testing.assert_close(fast[i], slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rope_layout", LAYOUTS)
@pytest.mark.parametrize("tubelet", [1, 2])
def test_a_frame_never_sees_a_later_frame_when_tokens_were_dropped(rope_layout: str, tubelet: int) -> None:
    model = encoder(rope_layout=rope_layout, tubelet_size=tubelet)
    tokens = group(3, (4, 4, 4), 24, values=192 * tubelet)
    others = group(2, (4, 2, 2), 7, values=192 * tubelet, seed=5)
    frames = tokens.positions[..., 0]
    with torch.no_grad():
        before, _ = model.encode_groups([tokens, others])
        for last in range(3):
            changed = torch.where((frames > last)[..., None], torch.randn_like(tokens.patches), tokens.patches)
            after, _ = model.encode_groups([tokens._replace(patches=changed), others])
            early = frames <= last
            assert torch.equal(after[:, 1:][early], before[:, 1:][early])
            assert not torch.equal(after[:, 1:][~early], before[:, 1:][~early])
            assert not torch.equal(after[:, 0], before[:, 0])


@pytest.mark.parametrize("rope_layout", LAYOUTS)
@pytest.mark.parametrize("use_rope", [True, False])
def test_a_frame_never_sees_a_later_frame_of_a_whole_video(rope_layout: str, use_rope: bool) -> None:
    model = encoder(rope_layout=rope_layout, use_rope=use_rope)
    video = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(video)
        for last in range(3):
            changed = video.clone()
            changed[:, :, last + 1 :] = torch.randn_like(changed[:, :, last + 1 :])
            after = model(changed)
            early = 1 + 16 * (last + 1)
            assert torch.equal(after[:, 1:early], before[:, 1:early])
            assert not torch.equal(after[:, early:], before[:, early:])
            assert not torch.equal(after[:, 0], before[:, 0])


def test_full_attention_sees_later_frames() -> None:
    model = encoder(attn_mode="full")
    video = torch.randn(1, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = video.clone()
    changed[:, :, 3] += 1
    with torch.no_grad():
        assert (model(video) - model(changed))[:, 1:17].abs().max() > 1e-3


def test_no_patch_sees_the_summary_token_and_it_sees_every_patch() -> None:
    model = encoder()
    video = torch.randn(1, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(video)
        model.cls_token.add_(1.0)
        after = model(video)
    assert torch.equal(before[:, 1:], after[:, 1:])
    model.zero_grad()
    patches = patchify(video, patch=8, tubelet=1).requires_grad_()
    (out,) = model.encode_groups([TokenGroup(patches, grid_positions((4, 4, 4))[None])])
    out[:, 0].sum().backward()
    assert patches.grad is not None
    assert bool((patches.grad.abs().amax(-1) > 0).all())


@pytest.mark.parametrize("use_rope", [True, False])
def test_dropping_then_embedding_equals_embedding_then_dropping(use_rope: bool) -> None:
    model = encoder(use_rope=use_rope)
    video = torch.randn(3, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches, positions = patchify(video, patch=8, tubelet=1), grid_positions((4, 4, 4))
    kept = kept_tokens(3, 64, 20, seed=1)
    pick = kept[..., None].expand(-1, -1, patches.shape[-1])
    with torch.no_grad():
        # Drop first: only the kept patches are ever embedded.
        (dropped,) = model.encode_groups([TokenGroup(patches.gather(1, pick), positions[kept])])
        # Embed first: all tokens through the embedding, then the same tokens through the blocks.
        everything, _ = model._tokens([patches], [positions[None]])
        everything = everything.view(3, 65, -1)
        rows = torch.cat((torch.zeros(3, 1, dtype=torch.int64), kept + 1), dim=1)
        x = everything.gather(1, rows[..., None].expand(-1, -1, model.embed_dim)).flatten(0, 1)
        _, layout = model._tokens([patches.gather(1, pick)], [positions[kept]])
        for block in model.blocks:
            x = block(x, layout)
        embedded = model.norm(x).view_as(dropped)
    torch.testing.assert_close(dropped, embedded, rtol=0, atol=1e-12)


def test_keeping_every_token_equals_the_dense_forward() -> None:
    model = encoder()
    video = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = patchify(video, patch=8, tubelet=1)
    positions = grid_positions((4, 4, 4)).expand(2, -1, -1)
    with torch.no_grad():
        (grouped,) = model.encode_groups([TokenGroup(patches, positions)])
        torch.testing.assert_close(grouped, model(video), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn_mode", ["full", "block_causal"])
def test_groups_together_equal_groups_apart(attn_mode: str) -> None:
    model = encoder(attn_mode=attn_mode)
    groups = [group(2, (4, 4, 4), 30), group(6, (4, 2, 2), 5, seed=1), group(1, (4, 4, 4), 1, seed=2)]
    with torch.no_grad():
        together = model.encode_groups(groups)
        for joint, tokens in zip(together, groups, strict=True):
            (apart,) = model.encode_groups([tokens])
            torch.testing.assert_close(joint, apart, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn_mode", ["full", "block_causal"])
@pytest.mark.parametrize("use_rope", [True, False])
def test_summaries_and_their_gradients_equal_those_of_the_whole_encoding(attn_mode: str, use_rope: bool) -> None:
    model = encoder(attn_mode=attn_mode, use_rope=use_rope)
    groups = [group(2, (4, 4, 4), 30), group(6, (4, 2, 2), 5, seed=1)]
    gradients = []
    for how in (
        lambda m: m.summarise_groups(groups),
        lambda m: [x[:, 0] for x in m.encode_groups(groups)],
    ):
        model.zero_grad()
        out = how(model)
        sum((x.square() * torch.arange(1, 129)).sum() for x in out).backward()
        gradients.append([torch.cat(out).detach(), *(p.grad.clone() for p in model.parameters())])
    largest = max(float(g.abs().max()) for g in gradients[1])
    for a, b in zip(*gradients, strict=True):
        assert float((a - b).abs().max()) <= 1e-12 * largest


def test_uint8_patches_are_normalised_as_the_loader_would() -> None:
    model = encoder()
    raw = torch.randint(0, 256, (2, 10, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tokens = group(2, (4, 4, 4), 10)
    ready = normalize_patches(raw, dtype=torch.float64)
    with torch.no_grad():
        (a,) = model.encode_groups([tokens._replace(patches=raw)])
        (b,) = model.encode_groups([tokens._replace(patches=ready)])
    assert torch.equal(a, b)


def test_batch_mates_do_not_change_an_encoding() -> None:
    model = encoder()
    tokens = group(4, (4, 4, 4), 12)
    with torch.no_grad():
        (before,) = model.encode_groups([tokens])
        patches = tokens.patches.clone()
        patches[1:] = 7.0
        (after,) = model.encode_groups([tokens._replace(patches=patches)])
    assert torch.equal(before[0], after[0])


def test_one_mask_serves_sequences_that_kept_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    tokens = group(3, (4, 4, 4), 64)
    with torch.no_grad():
        (apart,) = model.encode_groups([tokens])
        monkeypatch.setattr("marey.models.attention.SHARED_MASK_BYTES", 0)
        _, layout = model._tokens([tokens.patches], [tokens.positions])
        (shared,) = model.encode_groups([tokens])
    assert layout.masks[0].shape[0] == 1
    assert torch.equal(apart, shared)


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    first = build_encoder(model_config(), seed=3).state_dict()
    state = torch.get_rng_state()
    again = build_encoder(model_config(), seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = build_encoder(model_config(), seed=4).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    drawn = [k for k in first if k.endswith("weight") and "norm" not in k] + ["cls_token"]
    assert not any(torch.equal(first[k], other[k]) for k in drawn)


def test_no_two_layers_start_with_the_same_weights() -> None:
    state = build_encoder(model_config(), seed=0).state_dict()
    a, b = state["blocks.0.attn.qkv.weight"], state["blocks.1.attn.qkv.weight"]
    assert not torch.equal(a, b)
    assert abs(float((a * b).mean() / (a.std() * b.std()))) < 0.02


def test_initial_weights_have_the_published_spread() -> None:
    model = build_encoder(model_config(name="vit_tiny"), seed=0).requires_grad_(False)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert bool((value == 0).all()), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        else:
            std = 0.02
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
            tolerance = 5 / math.sqrt(2 * value.numel())
            assert float(value.std()) == pytest.approx(std, rel=tolerance), name
            assert float(value.mean()) == pytest.approx(0, abs=5 * std / math.sqrt(value.numel())), name


def test_video_of_another_size_and_length_is_encoded() -> None:
    with torch.no_grad():
        assert encoder()(torch.zeros(1, 3, 6, 16, 24, dtype=torch.float64)).shape == (1, 1 + 6 * 2 * 3, 128)


@pytest.mark.parametrize(
    ("video", "hint"),
    [
        (torch.zeros(1, 4, 3, 32, 32), "move its channel axis"),
        (torch.zeros(3, 4, 32, 32), "five axes"),
        (torch.zeros(1, 3, 4, 32, 32, dtype=torch.uint8), "normalize_video"),
        (torch.zeros(1, 3, 4, 30, 32), "not a multiple of 8"),
        (torch.zeros(1, 3, 0, 32, 32), "axis 2 is 0"),
    ],
)
def test_video_that_cannot_be_meant_is_refused_with_what_to_do(video: torch.Tensor, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        encoder()(video)


@pytest.mark.parametrize("attn_mode", ["full", "block_causal"])
def test_half_precision_autocast_gives_nearly_the_same_encoding(attn_mode: str) -> None:
    model = build_encoder(model_config(attn_mode=attn_mode), seed=0)
    tokens = group(2, (4, 4, 4), 12)
    tokens = tokens._replace(patches=tokens.patches.float())
    with torch.no_grad():
        (exact,) = model.encode_groups([tokens])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (rough,) = model.encode_groups([tokens])
            (summary,) = model.summarise_groups([tokens])
    similarity = torch.nn.functional.cosine_similarity
    assert similarity(exact, rough.float(), dim=-1).min() > 0.999
    assert similarity(exact[:, 0], summary.float(), dim=-1).min() > 0.999


def test_autocast_leaves_the_residual_stream_in_float32() -> None:
    model = build_encoder(model_config(), seed=0)
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, out: streams.append(out.dtype))
    video = torch.randn(1, 3, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(video)
    assert streams == [torch.float32] * 4


@pytest.mark.parametrize("use_rope", [True, False])
def test_inference_mode_gives_the_same_encoding(use_rope: bool) -> None:
    model = encoder(use_rope=use_rope)
    video = torch.randn(1, 3, 4, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        inferred = model(video)
    assert torch.equal(inferred, model(video).detach())
