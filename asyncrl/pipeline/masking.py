"""Leaving tokens that are too old out of the loss, where their rows lie."""

from __future__ import annotations

from asyncrl.data import DataProto

__all__ = ["mask_older"]


def mask_older(batch: DataProto, oldest_version: int) -> DataProto:
    """The same rows, with ``loss_mask`` False for tokens that were sampled under a version below ``oldest_version``.

    Columns ``loss_mask`` and ``weight_versions``, both ragged; ``batch`` itself is not changed.
    """
    import torch

    from asyncrl.data.ragged import offsets_of, ragged_from_values, values_of

    assert batch.batch is not None
    mask, versions = batch.batch["loss_mask"], batch.batch["weight_versions"]
    young = torch.logical_and(values_of(mask), values_of(versions) >= oldest_version)
    masked = DataProto.from_dict(tensors={"loss_mask": ragged_from_values(young, offsets_of(mask))})
    others = [str(name) for name in batch.batch.keys() if name != "loss_mask"]  # noqa: SIM118  a TensorDict iterates rows
    return batch.select(batch_keys=others).union(masked)
