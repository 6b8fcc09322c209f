"""What a group of Ray actors is made of: a class, its arguments, and options of the actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ResourceError
from asyncrl.single_controller.worker_group import ClassWithInitArgs

if TYPE_CHECKING:
    from asyncrl.single_controller.ray_resource_pool import RayResourcePool

__all__ = ["RayClassWithInitArgs", "demand_of"]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or decorated with ``ray.remote``, the arguments of every rank, and options of the actors.

    Options (:meth:`options`): ``num_cpus``, ``num_gpus``, ``resources`` (of one worker; the pool's share if not given),
    ``runtime_env``, ``env_vars`` (environment variables set before the class is loaded) and ``enable_task_events``:
    whether Ray keeps a record of every call, for its dashboard and ``ray list tasks``; False, since that costs each.

        >>> RayClassWithInitArgs(Greeter).options(num_cpus=0.5).actor_options
        {'num_cpus': 0.5}

    Raises:
        ResourceError: ``ray.remote`` gave the class options that workers cannot have.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        metadata = getattr(cls, "__ray_metadata__", None)
        if metadata is not None:
            options = dict(getattr(cls, "_default_options", {}))
            cls = metadata.modified_class
        super().__init__(cls, *args, **kwargs)
        self.actor_options = _checked_options(options)

    def options(self, **options: Any) -> RayClassWithInitArgs:
        """The same with these options added.

            >>> RayClassWithInitArgs(Greeter).options(env_vars={"LANG": "C"}).actor_options
            {'env_vars': {'LANG': 'C'}}

        Raises:
            ResourceError: an option that workers cannot have.
        """
        again = RayClassWithInitArgs(self.cls, *self.args, **self.kwargs)
        again.actor_options = {**self.actor_options, **_checked_options(options)}
        return again

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add options in place, under verl's name.

            >>> init = RayClassWithInitArgs(Greeter)
            >>> init.update_options({"num_gpus": 0.5})
            >>> init.actor_options
            {'num_gpus': 0.5}

        Raises:
            ResourceError: an option that workers cannot have.
        """
        self.actor_options = self.options(**options).actor_options


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    allowed = {"num_cpus", "num_gpus", "resources", "runtime_env", "env_vars", "enable_task_events"}
    if unknown := sorted(options.keys() - allowed):
        raise ResourceError(f"options {unknown} cannot be used: a worker takes {sorted(allowed)}")
    return options


def demand_of(made: RayClassWithInitArgs, pool: RayResourcePool, *, group: str) -> dict[str, Any]:
    """``num_cpus``, ``num_gpus`` and ``resources`` of one actor.

    Raises:
        ResourceError: more than a seat of the pool has.
    """
    options = made.actor_options
    demand = {
        "num_cpus": options.get("num_cpus", pool.cpus_per_worker),
        "num_gpus": options.get("num_gpus", pool.gpus_per_worker / pool.max_colocate_count),
        "resources": options.get("resources", pool.resources_per_worker),
    }
    seat = pool.bundle()
    asked = {"CPU": demand["num_cpus"], "GPU": demand["num_gpus"], **demand["resources"]}
    for resource, amount in asked.items():
        if amount > seat.get(resource, 0.0) + 1e-6:
            raise ResourceError(
                f"a worker of {group} asks for {amount:g} {resource}, and its seat in {pool!r} has "
                f"{seat.get(resource, 0.0):g}: raise the pool's resources per worker or lower the worker's options"
            )
    return demand
