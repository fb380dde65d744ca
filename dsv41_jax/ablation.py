"""Other roles for the layers of a config: what a model does without one of its parts, over the same parameters."""

from collections.abc import Mapping, Sequence

from dsv41_jax.config import FULL, REINDEX, REUSE, WINDOW, Config


def ablated(
    cfg: Config,
    *,
    roles: Mapping[int, str] | None = None,
    candidates: bool = True,
    engram: bool = True,
    window_only: Sequence[int] = (),
) -> Config:
    """The config with other roles: `roles` gives layers another mode (full, reindex, reuse, window), without
    `candidates` every index source scores all entries, without `engram` no layer looks anything up. Layers that are
    `window_only` attend to their window alone, and still publish what others read.

    A layer keeps the rotary frequencies that it was trained with. Raises ValueError for an unknown mode or layer, and
    ConfigError where the roles do not fit together; that a role lacks parameters shows when a model takes the config.
    """
    roles = dict(roles or {})
    for layer in (*roles, *window_only):
        if not 0 <= layer < cfg.num_hidden_layers:
            raise ValueError(f"ablate: layer {layer} is not in 0..{cfg.num_hidden_layers - 1}")
    for layer, mode in roles.items():
        if mode not in (WINDOW, FULL, REINDEX, REUSE):
            raise ValueError(f"roles: {mode!r} of layer {layer} is not one of 'window', 'full', 'reindex', 'reuse'")
        if mode != WINDOW and not cfg.compress_ratios[layer]:
            raise ValueError(
                f"roles: layer {layer} was trained on its window alone (compress_ratios 0), not as {mode!r}"
            )
    kept = set(range(cfg.num_hidden_layers)) - set(roles)
    of = {mode: {layer for layer, role in roles.items() if role == mode} for mode in (WINDOW, FULL, REINDEX, REUSE)}
    changes: dict[str, object] = {
        "kv_source_layer_ids": sorted(kept & set(cfg.kv_source_layer_ids) | of[FULL]),
        "index_source_layer_ids": sorted(kept & set(cfg.index_source_layer_ids) | of[FULL] | of[REINDEX]),
        "window_only_layer_ids": sorted(kept & set(cfg.window_only_layer_ids) | of[WINDOW] | set(window_only)),
    }
    if not candidates:
        changes["candidate_source_layer_id"] = None
    if not engram:
        changes |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    return cfg.replace(**changes)
