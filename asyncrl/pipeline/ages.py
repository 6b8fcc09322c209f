"""How old a token is when it is trained on, told where its row lies."""

from __future__ import annotations

from asyncrl.data import DataProto

__all__ = ["with_ages"]


def with_ages(batch: DataProto, *, version: int) -> DataProto:
    """The same rows with a column ``ages``: ``version`` minus the version that sampled the token; 0 where none did.

    Column ``weight_versions``, ragged; a batch without it is given back as it is.
    """
    if batch.batch is None or "weight_versions" not in batch.batch.keys():  # noqa: SIM118  a TensorDict iterates rows
        return batch
    import torch

    from asyncrl.data.ragged import offsets_of, ragged_from_values, values_of

    versions = values_of(batch.batch["weight_versions"])
    ages = torch.where(versions >= 0, version - versions, 0).float()
    return batch.union(
        DataProto.from_dict(tensors={"ages": ragged_from_values(ages, offsets_of(batch.batch["weight_versions"]))})
    )
