"""verl's names with verl's defaults: programs written for its single controller run after a change of imports.

Where a default differs from asyncrl's own, this module has verl's: calls block and return values, pools have GPUs and
may be shared by ten groups, ``ALL_TO_ALL`` scatters lists and copies other values. All else is asyncrl's. What is not
supported is listed in ``docs/migrating-from-verl.md``, and raises an error here instead of being ignored.

    >>> from asyncrl.compat.verl import ClassWithInitArgs, Dispatch, Worker, register  # was: from verl...
    >>> from asyncrl.single_controller.local import LocalWorkerGroup
    >>> class Counter(Worker):
    ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    ...     def add(self, x):
    ...         return self.rank + x
    >>> with LocalWorkerGroup(ClassWithInitArgs(cls=Counter), world_size=3) as group:
    ...     group.add(10)  # blocking, as in verl
    [10, 11, 12]
"""

from __future__ import annotations

from asyncrl.compat.verl.controller import (
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Worker,
    create_colocated_worker_raw_cls,
    register,
)
from asyncrl.compat.verl.protocol import (
    all_gather_data_proto,
    collate_fn,
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
)
from asyncrl.data.future import DataProtoFuture
from asyncrl.data.proto import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from asyncrl.single_controller.colocation import create_colocated_worker_cls, create_colocated_worker_cls_fused
from asyncrl.single_controller.decorator import Dispatch, Execute
from asyncrl.single_controller.dispatch import (
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from asyncrl.single_controller.mesh import make_nd_compute_dataproto_dispatch_fn
from asyncrl.single_controller.ray.backend import RayClassWithInitArgs
from asyncrl.single_controller.ray.resource_pool import SubRayResourcePool, merge_resource_pool, split_resource_pool
from asyncrl.single_controller.resource_pool import ResourcePool, Role
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "SubRayResourcePool",
    "Worker",
    "WorkerGroup",
    "all_gather_data_proto",
    "collate_fn",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "fold_batch_dim",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "list_of_dict_to_dict_of_list",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "update_dispatch_mode",
]
