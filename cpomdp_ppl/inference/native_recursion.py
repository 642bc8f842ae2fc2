"""The particle filter's recursion, each of its steps by the compiled kernel."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.kernel_cloud import KernelCloud, array_of
from cpomdp_ppl.inference.native_filter import I64, MOVE, RESAMPLE, REWARD, VOID, WEIGH
from cpomdp_ppl.inference.particle_filter import SMC
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from cpomdp_ppl.inference.cloud import Cloud
    from cpomdp_ppl.inference.native_filter import FilterKernel
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.inference.particle_filter import ParticleFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Leaf, Signature
    from cpomdp_ppl.state import State

CPU = torch.device("cpu")

DRAWN_AT_ONCE = 64
"""Keys that are drawn together."""


class Outcome(NamedTuple):
    """What the kernel made of a cloud.

    Attributes:
        cloud: The cloud after it.
        increment: The evidence increment, float64 `[C, B]`; nothing sensible, if nothing was weighed.
        parents: The parent of every particle, int32 `[C, B, N]`; None if that was not asked for.
    """

    cloud: Cloud
    increment: Tensor
    parents: Tensor | None


class Keys:
    """Random numbers one by one, those of a generator of its own, but drawn many at a time.

    Args:
        seed: Seed of the generator.

    Attributes:
        position: How many were taken. It can be put back, to take the same ones again.

    Examples:
        >>> keys = Keys(0)
        >>> first = keys.take()
        >>> first == int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(0)))
        True
        >>> keys.position = 0
        >>> keys.take() == first
        True
    """

    def __init__(self, seed: int) -> None:
        self.position = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[int] = []

    def take(self) -> int:
        """The next number, from 0 to 2**62 - 1."""
        if self.position == len(self._drawn):
            more = torch.randint(2**62, (DRAWN_AT_ONCE,), generator=self._generator, device=CPU)
            self._drawn += more.tolist()
        self.position += 1
        return self._drawn[self.position - 1]


class NativeSMC(SMC):
    """As `SMC`, with the same beliefs, but programs run in the kernel.

    What the kernel finds wrong, or has no code for, is left to the programs themselves, which serve it or say
    what is wrong. Each call draws one number from a generator, and all others from that.

    Args:
        model: The model.
        settings: The filter.
        signature: The model's signature, as its kernel knows it.

    Attributes:
        keys: Where random numbers come from; None for torch's generator. With keys of its own, the recursion
            needs no `inference_scope` around it.
    """

    def __init__(self, model: CPOMDP, settings: ParticleFilter, signature: Signature) -> None:
        super().__init__(model, settings, signature)
        self._settings = settings
        self.keys: Keys | None = None

    def scope(self) -> AbstractContextManager[None]:
        """Where programs can run, and go on with random numbers of this recursion."""
        return nullcontext() if self.keys is None else inference_scope(self.model, self.keys.take() % 2**32)

    def _key(self) -> int:
        return int(torch.randint(2**62, (), device=CPU)) if self.keys is None else self.keys.take()

    def _key_aside(self) -> int:
        """A key for random numbers of rewards on arrival, which moves no stream; else 0."""
        if not self.model.pays_on_arrival:
            return 0
        if self.keys is None:
            return super()._seed_aside()
        position = self.keys.position
        key = self.keys.take() ^ 1  # another one than that of the next step
        self.keys.position = position
        return key

    def start(self, num_episodes: int) -> Cloud:
        """Particles from the model's `initial`, all of the same weight."""
        found = self._run(num_episodes, self.N, 0)
        if found is not None:
            return found.cloud
        with self.scope():
            return super().start(num_episodes)

    def condition(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor]:
        """Weight the particles by what was observed."""
        found = self._from(cloud, WEIGH, observed)
        if found is not None:
            return found.cloud, found.increment
        with self.scope():
            return super().condition(cloud, observed)

    def step(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor]:
        """Resample, move, reweight."""
        found = self._from(cloud, RESAMPLE | MOVE | WEIGH, observed)
        if found is not None:
            return found.cloud, found.increment
        with self.scope():
            cloud, increment, _ = super().step_with_parents(cloud, observed)
            return cloud, increment

    def step_with_parents(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor, Tensor | None]:
        """As `step`, with the parent of every particle, `[C, B, N]`; None if all are their own."""
        found = self._from(cloud, RESAMPLE | MOVE | WEIGH, observed, parents=True)
        if found is not None:
            assert found.parents is not None
            return found.cloud, found.increment, found.parents.long()
        with self.scope():
            return super().step_with_parents(cloud, observed)

    def move_states(self, states: State, action: Tensor) -> State:
        """Draw where actions `[B]` lead from states, leaves `[C, B, N, …]`."""
        shape = next(leaf for _, leaf in leaves(states)).shape[:3]
        memory = self._memory(shape[1], shape[2]) if shape[0] == len(self.context) else None
        if memory is not None:
            memory.take_state(self.signature.broadcast(states, shape))
            memory.take_actions(action, None)
            moved = memory.new_state()
            if memory.run(self._settings, MOVE, 1, self._key()):
                return moved
        with self.scope():
            return super().move_states(states, action)

    def expected_reward(self, cloud: Cloud, action: Tensor) -> Tensor:
        """The particles' weighted mean reward."""
        memory = self._memory(*cloud.shape[1:])
        if memory is not None:
            memory.take_cloud(cloud)
            memory.take_actions(action, None)
            reward = memory.new_rows("rewards", self.dtype)
            if memory.run(self._settings, REWARD, 1, self._key_aside()):
                return reward
        if self.keys is None:
            return super().expected_reward(cloud, action)
        position = self.keys.position
        with self.scope():
            reward = super().expected_reward(cloud, action)
        self.keys.position = position  # to ask what is earned changes nothing
        return reward

    def known_masks(self) -> dict[int | None, Mapping[str, Tensor]] | None:
        """Room to note what the model, as it is now, shows of one episode after every action.

        None if masks may depend on more: on what else was observed, or on what is learned.
        """
        kernel = self._settings.kernel(self.model)
        if kernel is None or kernel.parameters.found or self.signature.dependencies.mask_parents:
            return None
        return kernel.masks

    def _memory(self, B: int, N: int) -> _Memory | None:
        kernel = self._settings.kernel(self.model)
        return None if kernel is None else _Memory(kernel, B, N)

    def _from(self, cloud: Cloud, parts: int, observed: Observed, *, parents: bool = False) -> Outcome | None:
        """Take a cloud through parts of a step."""
        _, B, N = cloud.shape
        return self._run(B, N, parts, cloud, observed, parents)

    def _run(
        self,
        B: int,
        N: int,
        parts: int,
        before: Cloud | None = None,
        observed: Observed | None = None,
        with_parents: bool = False,
    ) -> Outcome | None:
        """Run the kernel on a cloud, or from the start; None if it has to be done otherwise."""
        memory = self._memory(B, N)
        if memory is None:
            return None
        steps = int(observed is not None and observed.action is not None)
        when = "" if steps else "first_"
        resampled: Tensor | None = None  # None for what the kernel will say
        if before is None:
            resampled = torch.zeros(self.model.num_contexts, B, dtype=torch.bool, device=CPU)
        else:
            memory.take_cloud(before)
            if not parts & RESAMPLE:
                resampled = before.resampled
        if observed is not None:
            if steps:
                memory.take_actions(observed.action, observed.alive)
            if parts & WEIGH and not memory.take_observations(observed, when):
                return None
        increment = memory.new_rows("increments" if steps else "first_increment", torch.float64)
        parents = memory.new("ancestors", torch.int32) if with_parents else None
        cloud = memory.new_cloud(resampled)
        done = memory.run(self._settings, parts, steps, self._key())
        return Outcome(cloud, increment, parents) if done else None


class _Memory:
    """What the kernel reads and writes.

    Args:
        kernel: The kernel.
        B: Number of episodes.
        N: Number of particles.
    """

    def __init__(self, kernel: FilterKernel, B: int, N: int) -> None:
        self._kernel, self._shape = kernel, (kernel.num_contexts, B, N)
        self._places: dict[str, int] = {}  # addresses, by the kernel's names for what is there
        self._held: list[Any] = []  # what has to stay there
        self._readable = True

    def _take(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
            self._readable = False
            return 0
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            self._held.append(tensor)
        address = self._places[name] = tensor.data_ptr()
        return address

    def _hold(self, name: str, array: ctypes.Array[Any]) -> None:
        self._held.append(array)
        self._places[name] = ctypes.addressof(array)

    def take_actions(self, action: Tensor | None, alive: Tensor | None) -> None:
        """What is done, `[B]` or `[B, D]`, and which episodes go on, `[B]`: all, if that is not said."""
        B = self._shape[1]
        dim = self._kernel.traced.action_dim
        if action is None:
            self._hold("actions", array_of(I64, B)())
        elif dim is None:
            self._take("actions", action, torch.int64, (B,))
        else:
            vectors = action.double().contiguous()
            self._held.append(vectors)
            self._take("vectors", vectors, torch.float64, (B, dim))
        self._hold("lengths", array_of(I64, B)(*([1] * B if alive is None else alive.tolist())))

    def take_state(self, state: State) -> None:
        """States, leaves `[C, B, N, …]`."""
        found = []
        for (_, leaf), (event, dtype) in zip(leaves(state), self._kernel.traced.leaves, strict=True):
            first = self._take("state_in", leaf, dtype, (*self._shape, *event))
            found += _numbers(first, leaf, event)
        self._hold("state_in", array_of(VOID, len(found))(*found))

    def take_cloud(self, cloud: Cloud) -> None:
        """Particles with their weights and families."""
        layout = self._kernel.layout(self._shape[1], self._shape[2])
        if isinstance(cloud, KernelCloud) and vars(cloud).get("layout") is layout:
            self._held.append(layout.places(cloud.block, "in", self._places))
            return
        weights, families, real, shape = cloud.weights, cloud.families, self._kernel.dtype, self._shape
        self.take_state(cloud.state)
        self._take("weights_in", weights.values, real, shape)
        self._take("ess_in", weights.ess, real, shape[:2])
        self._take("founders_in", families.founders, torch.int32, shape)
        self._take("noise_in", families.noise, real, shape[:2])

    def take_observations(self, observed: Observed, when: str) -> bool:
        """What was observed. Says whether the kernel knows what to do with it."""
        if not self._kernel.fits(observed.observations):
            return False
        if self._shape[1] == 1:
            values, flags = self._kernel.packed_one(observed)
            self._hold(f"{when}values", values)
            self._hold(f"{when}flags", flags)
            return True
        packed = self._kernel.packed(observed.observations, observed.observed, self._shape[1:2])
        for name, tensor in zip(("values", "flags"), packed, strict=True):
            self._held.append(tensor)
            self._places[f"{when}{name}"] = tensor.data_ptr()
        return True

    def new(self, name: str, dtype: torch.dtype) -> Tensor:
        """Room for a number of every particle, `[C, B, N]`."""
        room = torch.empty(self._shape, dtype=dtype, device=CPU)
        self._places[name] = room.data_ptr()
        return room

    def new_rows(self, name: str, dtype: torch.dtype) -> Tensor:
        """Room for a number of every row, `[C, B]`, which the kernel has as `[B, C]`."""
        C, B, _ = self._shape
        room = torch.empty((C, 1) if B == 1 else (B, C), dtype=dtype, device=CPU)
        self._places[name] = room.data_ptr()
        return room if B == 1 else room.T

    def new_state(self) -> State:
        """Room for states, leaves `[C, B, N, …]`."""
        found: list[int] = []

        def leaf_room(leaf: Leaf) -> Tensor:
            room = torch.empty((*self._shape, *leaf.shape), dtype=leaf.dtype, device=CPU)
            found.extend(_numbers(room.data_ptr(), room, leaf.shape))
            return room

        state: State = map_state(leaf_room, self._kernel.signature.state)
        self._hold("state_out", array_of(VOID, len(found))(*found))
        return state

    def new_cloud(self, resampled: Tensor | None) -> Cloud:
        """Room for a cloud; `resampled` if that is known already."""
        layout = self._kernel.layout(self._shape[1], self._shape[2])
        block = torch.empty(layout.size, dtype=torch.uint8, device=CPU)
        self._held.append(layout.places(block, "out", self._places))
        if resampled is None:
            self._places["resampled"] = block.data_ptr() + layout.resampled.offset
        return KernelCloud.within(block, layout, resampled)

    def run(self, settings: ParticleFilter, parts: int, steps: int, key: int) -> bool:
        """Run the kernel; whether that went well. All its random numbers come from the key."""
        if not self._readable:
            return False
        self._hold("keys", array_of(ctypes.c_uint64, 3)(key, key, key))
        _, B, N = self._shape
        return self._kernel.execute(settings, parts, B, steps, N, self._places) == 0


def _numbers(first: int, leaf: Tensor, event: torch.Size) -> list[int]:
    """Where each number of the state begins in a leaf `[C, B, N, *event]`."""
    size = leaf.element_size()
    return [first + k * size for k in range(event.numel())]
