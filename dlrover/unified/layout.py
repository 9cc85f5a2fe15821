"""
Which instances share a bundle of the cluster, and how large each bundle is. Checked when a job is built: nothing starts that has no room.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dlrover.protocol.errors import ConfigError

CPU, GPU, MEMORY = "CPU", "GPU", "memory"


class Spread(enum.StrEnum):
    """How bundles share machines; Ray's words."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


class BundleLayout(Struct, frozen=True, kw_only=True):
    bundles: tuple[dict[str, float], ...] = ()
    """By Ray's names; memory in bytes."""
    members: tuple[str, ...] = ()
    """For people: what is in each bundle."""
    places: dict[str, tuple[int, ...]] = {}
    """By role: the bundle of each instance, or of each node of an elastic role."""
    demands: dict[str, dict[str, float]] = {}
    """By role: of one instance or node."""
    spread: Spread = Spread.PACK


class RoleSize(Struct, frozen=True, kw_only=True):
    """What one role asks for."""

    name: str
    count: int
    """Instances, or nodes of an elastic role."""
    demand: Mapping[str, float]
    """Of one."""
    per_group: int = 1
    """So many instances share a bundle."""

    @property
    def num_groups(self) -> int:
        return self.count // self.per_group


def lay_out(
    roles: Sequence[RoleSize], together: Sequence[Sequence[str]], *, spread: Spread = Spread.PACK
) -> BundleLayout:
    """One bundle for each group; roles that are `together` share the bundles of the same place. Raises `ConfigError`."""
    known = {role.name: role for role in roles}
    for role in roles:
        if role.per_group < 1 or role.count % role.per_group:
            raise ConfigError(
                f"Role {role.name}: {role.count} instances cannot be divided into groups of {role.per_group}. "
                f"Make the count a multiple of {role.per_group}."
            )
    groups = [list(names) for names in together]
    _check_together(groups, known)
    taken = {name for names in groups for name in names}
    groups += [[role.name] for role in roles if role.name not in taken]
    bundles: list[dict[str, float]] = []
    members: list[str] = []
    places: dict[str, tuple[int, ...]] = {}
    for names in groups:
        first, size = len(bundles), known[names[0]].num_groups
        if not any(known[name].demand for name in names):
            continue
        for place in range(size):
            bundle: dict[str, float] = {}
            for name in names:
                for resource, amount in known[name].demand.items():
                    bundle[resource] = round(bundle.get(resource, 0.0) + amount * known[name].per_group, 4)
            bundles.append(bundle)
            members.append(", ".join(_shown(known[name], place) for name in names))
        for name in names:
            role = known[name]
            places[name] = tuple(first + rank // role.per_group for rank in range(role.count))
    return BundleLayout(
        bundles=tuple(bundles),
        members=tuple(members),
        places=places,
        demands={role.name: dict(role.demand) for role in roles},
        spread=spread,
    )


def check_room(layout: BundleLayout, machines: Sequence[Mapping[str, float]]) -> None:
    """Raises `ConfigError` if a cluster that does not grow can never place it. `machines`: what each has in all."""
    for bundle, members in zip(layout.bundles, layout.members, strict=True):
        if any(all(machine.get(name, 0.0) >= amount for name, amount in bundle.items()) for machine in machines):
            continue
        most = {name: max((machine.get(name, 0.0) for machine in machines), default=0.0) for name in bundle}
        raise ConfigError(
            f"No machine of this cluster is large enough for {members}: it asks for {say(bundle)}, and the most "
            f"that a machine has is {say(most) or 'nothing'}. Ask for less, or place these roles separately."
        )
    if layout.spread is Spread.STRICT_SPREAD and len(layout.bundles) > len(machines):
        raise ConfigError(
            f"STRICT_SPREAD needs one machine for each of {len(layout.bundles)} groups of instances, but this "
            f"cluster has only {len(machines)}."
        )
    for name in sorted({name for bundle in layout.bundles for name in bundle}):
        asked = sum(bundle.get(name, 0.0) for bundle in layout.bundles)
        there = sum(machine.get(name, 0.0) for machine in machines)
        if asked > there + 1e-6:
            raise ConfigError(
                f"The job asks for {say({name: asked})} in all, but this cluster has only {say({name: there})}."
            )


def say(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{amount / 2**20:g} MiB of memory" if name == MEMORY else f"{amount:g} {name}"
        for name, amount in amounts.items()
    )


def _check_together(groups: Sequence[Sequence[str]], known: Mapping[str, RoleSize]) -> None:
    seen: set[str] = set()
    for names in groups:
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"`together` names the role {name}, which is not defined. Roles are {', '.join(known)}."
                )
            if name in seen:
                raise ConfigError(f"`together` names the role {name} twice. Name it once.")
            seen.add(name)
        sizes = {name: known[name].num_groups for name in names}
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} has {number}" for name, number in sizes.items())
            raise ConfigError(f"Roles in one `together` need the same number of groups: {shown}.")


def _shown(role: RoleSize, place: int) -> str:
    ranks = range(place * role.per_group, (place + 1) * role.per_group)
    return " and ".join(f"{role.name}-{rank}" for rank in ranks)
