"""PFT-DPW: search in the tree of particle beliefs, widened as it is visited, for many episodes in lock step.

Sunberg and Kochenderfer, "Online algorithms for POMDPs with continuous state, action, and observation spaces"
(2018). A node is a belief, an edge an action that is taken in it. Observations come into play by progressive
widening, and so do actions, if they are continuous. With a temperature, information about the context is a
reward, too (IPFT; Fischer and Tas, 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from baselines.belief import Memory, conditioned, decided
from baselines.commitments import Commitment, plans, play, returns_after, returns_of
from cpomdp_ppl.actions import random_actions
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import require, require_count, require_model, require_number
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import SMC, Cloud, Observed, ParticleFilter, inference_scope
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.rng import require_seed, seed_for
from cpomdp_ppl.signature import ended_in, read_signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.actions import Box
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History
    from cpomdp_ppl.signature import Signature

LeafValue: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]
"""A user's own: `(states [C, B, M, …], posterior [B, C], time [B]) -> values [B]`."""

LEAVES = ("commitment", "qmdp", "rollout")
BYTES_AT_ONCE = 2**29
"""Bytes that trees grown together may take."""
SPREAD = 0.25
"""The default exploration constant, in units of what returns met in a search are apart."""
TINY = 1e-12
"""In place of 0: an untried action has an infinite bonus, and 0 times ∞ is no number."""
DISCRETE_OUTCOMES = 64
"""Outcomes drawn for an edge where there may be equal ones among them."""
NEVER = 2**40


@dataclass(frozen=True, eq=False)
class PFT:
    """PFT-DPW as a policy: at every step, a search from the belief it has come to.

    A belief is a particle filter for every context, with the posterior over contexts. What an action earns in
    it is `Σ_c P(c | h) E[r_c(s, a) | h, c]`; with a temperature τ, the fall of the posterior's entropy is
    added, τ units of reward a nat, and the search maximises `E[return] + τ I(C; Y)`. As the return is
    discounted, and information is not, a nat at time t is worth `τ γ^{-t}` of the rewards of that time.

    What is seen after an action is drawn from the belief as a step of the model, context and all. A new draw
    comes into play as long as there are at most `k N^α` different ones after N visits; otherwise those in
    play take turns. Equal observations share a child: if few values, or nothing at all, can be seen, the tree
    is narrow. A search ends at the horizon, or where the episode is seen to end; any other new node is worth
    what `leaf` says.

    Continuous actions of a node are drawn uniformly, in a sequence whose beginnings are well spread. A new
    one comes into play as long as there are at most `k N^α` after N visits of the node.

    Args:
        model: The CPOMDP.
        num_simulations: Simulations in a search, each of which adds a node.
        num_particles: Particles for every context in a node.
        exploration: UCB1's constant, in units of reward. Left out, a quarter of what the best and the worst
            return are apart that a search has met, those of commitments in each context among them.
        widening: `(k, α)` of observations.
        action_widening: `(k, α)` of continuous actions; not needed for others.
        leaf: What a new node is worth. `"commitment"`: the best action and the best commitment after it,
            chosen without knowing the context, which some policy earns; that of each action also is its
            first value, and counts as one visit. (Were an action's first value what it earns if it is
            repeated for ever, whatever costs now and pays later would never be tried.) Of continuous actions:
            the best commitment alone, and no first values. `"qmdp"`: the best
            commitment in each context, as if it were known, which is optimistic; `"rollout"`: random actions;
            or a function `(states [C, B, M, …], posterior [B, C], time [B]) -> values [B]`.
        commitments: What `"commitment"` and `"qmdp"` choose from: actions to repeat, by index or name, or
            functions from the time to one. Left out, every action; a leaf is then valued by as many plans as
            there are pairs of actions. Of a box left out, its middle, and either end of every axis.
        temperature: τ, for IPFT, in units of reward a nat, as rewards are worth at the start.
        leaf_particles: States M in every context that a leaf is valued by.
        root_particles: Particles for every context in the filter that follows the episode.
        chunk: How many episodes to handle at once; chosen to bound memory if left out. Chunks have random
            numbers of their own.
        seed: The same seed gives the same decisions; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl.evaluation import evaluate
        >>> from cpomdp_ppl.models import LineGrid
        >>> model = LineGrid(horizon=6)
        >>> evaluate(model, PFT(model, 100), 50).returns.mean > 5
        True
    """

    model: CPOMDP
    num_simulations: int = 500
    num_particles: int = 32
    exploration: float | None = None
    widening: tuple[float, float] = (2.0, 0.25)
    action_widening: tuple[float, float] = (3.0, 0.25)
    leaf: str | LeafValue = "commitment"
    commitments: Sequence[Commitment] | None = None
    temperature: float = 0.0
    leaf_particles: int = 4
    root_particles: int = 1000
    chunk: int | None = None
    seed: int | None = 0

    def __post_init__(self) -> None:
        require_model(self.model)
        for name in ("num_simulations", "num_particles", "leaf_particles", "root_particles"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if self.chunk is not None:
            object.__setattr__(self, "chunk", require_count("chunk", self.chunk))
        if self.exploration is not None:
            require_number("exploration", self.exploration, "None or a number, not negative")
        require_number("temperature", self.temperature, "a number, not negative")
        for name in ("widening", "action_widening"):
            require_widening(name, getattr(self, name))
        known = callable(self.leaf) or self.leaf in LEAVES
        require(known, "leaf", self.leaf, f"one of {list(LEAVES)}, or a function")
        require_seed(self.seed)
        plans(self.model, self.commitments)

    def start(self, prior: Tensor) -> Memory:
        """The belief before anything was seen, from a prior over contexts `[B, C]`."""
        return Memory.first(self.model, prior, self.root_particles, seed_for(self.seed, 0))

    def act(self, history: History, memory: Memory) -> tuple[Tensor, Memory]:
        """Take in what was just seen, search, and take the action that the search has visited most.

        Raises:
            DegenerateWeightsError: If no context can have produced what was seen.
        """
        t = history.time
        memory = memory.caught_up(self.model, history, self.seed)
        size = self._episodes_at_once() if self.chunk is None else self.chunk

        def best(rows: Tensor | None) -> Tensor:
            parts = memory.rows(rows).parts(size)
            return torch.cat([self.search(part, t, n).most_visited() for n, part in enumerate(parts)])

        return decided(self.model, history, best), memory

    def search(self, memory: Memory, time: int, chunk: int = 0) -> Tree:
        """The trees after all simulations, from beliefs held at a time; chunks draw different numbers."""
        require(0 <= time < self.model.horizon, "time", time, f"0 to {self.model.horizon - 1}")
        with inference_scope(self.model, seed_for(self.seed, 2, time, chunk)):
            search = Search(self, memory, time)
            for k in range(1, self.num_simulations + 1):
                search.simulate(k)
        return search.tree

    def _episodes_at_once(self) -> int:
        """As many as bound the memory that trees take."""
        with inference_scope(self.model, 0):
            signature = read_signature(self.model)
        state = sum(leaf.shape.numel() for _, leaf in leaves(signature.state))
        seen = sum(site.shape.numel() for site in signature.observations.values())
        A, C, N, J = (
            most_actions(self),
            self.model.num_contexts,
            self.num_particles,
            most_outcomes(self, signature),
        )
        axes = 0 if self.model.box is None else self.model.box.dim
        numbers = C * N * (state + 2) + J * (seen + 7) + (5 + axes) * A  # in a node
        return how_many_fit(BYTES_AT_ONCE, 4 * numbers * (self.num_simulations + 1))


@dataclass(frozen=True, eq=False)
class Tree:
    """B trees of K nodes each, grown side by side: in each, simulation k may add the node k. The root is 0.

    An edge is a node and an action: one of the model's, or of those that were drawn for the node beforehand,
    of which some are in play. What can happen on it is kept with the first node it led to: J outcomes, drawn
    beforehand, of which some are in play.
    """

    belief: Cloud  # of every node, leaves [K, C, B, …]
    log_posterior: Tensor  # over contexts, [K, B, C]
    depth: Tensor  # steps from the root, [K, B]; -1 for nodes that were never added
    reward: Tensor  # of the edge that leads to a node, [K, B]; 0 for the root
    visits: Tensor  # of every edge, [K, B, A]
    values: Tensor  # the mean return of simulations through an edge, from there on, [K, B, A]
    first: Tensor  # the first node an edge led to, [K, B, A]; 0 for none
    observations: dict[str, Tensor]  # outcomes of the edge whose first node this is, by site [K, B, J, …]
    observed: dict[str, Tensor]  # whether they were, by site, bool [K, B, J, …]
    alike: Tensor  # the first of the outcomes that is equal to each, [K, B, J]
    distinct: Tensor  # how many of the first 0 … J differ, [K, B, J + 1]; NEVER where no more come
    in_play: Tensor  # how many outcomes are, [K, B]
    children: Tensor  # the nodes they lead to, [K, B, J]; 0 for none
    over: Tensor | None  # whether the episode ends with a node, bool [K, B]; None where none can
    drawn: Tensor | None  # continuous actions of every node, [K, B, A, D]

    def action(self, node: Tensor, episode: Tensor, number: Tensor) -> Tensor:
        """What edges are to the model, by node, episode and number in the node, `[R]`: `[R]` or `[R, D]`."""
        return number if self.drawn is None else self.drawn[node, episode, number]

    def most_visited(self) -> Tensor:
        """The action visited most at the root, `[B, …]`; of several, the one of the highest value.

        A mean return is trustworthy after many visits; an action that was lucky in a few is not chosen.
        """
        visits, values = self.visits[0], self.values[0]
        most = visits == visits.amax(1, keepdim=True)
        best = torch.where(most, values, -torch.inf).argmax(1)
        return self.action(torch.zeros_like(best), torch.arange(len(best), device=best.device), best)


def planted(cloud: Cloud, log_posterior: Tensor, programs: Generative, K: int, A: int, J: int) -> Tree:
    """Trees of nothing but a root, with room for K nodes, A actions in each, and J outcomes of an edge."""
    model, B, device = programs.model, len(log_posterior), log_posterior.device

    def room(like: Tensor) -> Tensor:
        kept = torch.empty((K, *like.shape), dtype=like.dtype, device=device)
        kept[0] = like
        return kept

    def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros((K, B, *shape), dtype=dtype, device=device)

    sites = programs.signature.observations
    depth = zeros().fill_(-1)
    depth[0] = 0
    return Tree(
        belief=map_belief(room, cloud),
        log_posterior=room(log_posterior),
        depth=depth,
        reward=zeros(dtype=torch.float64),
        visits=zeros(A, dtype=torch.float64),
        values=zeros(A, dtype=torch.float64),
        first=zeros(A),
        observations={name: zeros(J, *site.shape, dtype=site.dtype) for name, site in sites.items()},
        observed={name: zeros(J, *site.plates, dtype=torch.bool) for name, site in sites.items()},
        alike=zeros(J),
        distinct=zeros(J + 1).fill_(NEVER),
        in_play=zeros(),
        children=zeros(J),
        over=zeros(dtype=torch.bool) if model.can_end else None,
        drawn=None if model.box is None else room(spread_in(model.box, B, A, device)),
    )


@dataclass(frozen=True)
class Frontier:
    """Where R of the B simulations leave the tree: at an edge, by an outcome without a node; all `[R]`."""

    episode: Tensor  # which simulation
    node: Tensor  # the last one inside the tree
    action: Tensor  # number of the one taken there
    first: Tensor  # node that edge led to; 0 if this is its first visit
    outcome: Tensor  # which of the edge's
    depth: Tensor  # of the node


class Search:
    """B searches at work on their trees, from beliefs held at a time."""

    def __init__(self, settings: PFT, memory: Memory, time: int) -> None:
        self.settings, self.time = settings, time
        self.model = settings.model
        self.steps = self.model.horizon - time
        self.B, self.C = memory.log_posterior.shape
        self.A = most_actions(settings)
        self.programs = Generative(self.model)
        self.J = most_outcomes(settings, self.programs.signature)
        self.filter: SMC = ParticleFilter(settings.num_particles).recursion(self.model)
        self.plans = plans(self.model, settings.commitments).to(self.model.device)
        cloud = self.filter.of_states(memory.belief.spread(settings.num_particles))
        K = settings.num_simulations + 1
        self.tree = planted(cloud, memory.log_posterior, self.programs, K, self.A, self.J)
        visits = torch.arange(K, dtype=torch.float64, device=self.model.device)
        k, alpha = settings.widening
        self.limit = k * visits**alpha  # of outcomes
        self.limit[0] = 0
        k, alpha = settings.action_widening
        self.last_action = (k * visits**alpha).floor()  # the number of the last action in play
        self.last_action[0] = 0
        self.numbers = torch.arange(self.A, device=self.model.device)
        self.episode = torch.arange(self.B, device=self.model.device)
        # At the root, from all the particles there are: of the last step nothing else matters.
        root = torch.zeros_like(self.episode)
        every = [self.tree.action(root, self.episode, torch.full_like(root, a)) for a in range(self.A)]
        self.first_reward = torch.stack([memory.expected_reward(self.filter, a) for a in every], 1)  # [B, A]
        given = settings.exploration or 0.0
        self.exploration = torch.full_like(self.first_reward[:, :1], max(given, TINY))  # [B, 1]
        self.lowest = torch.full_like(self.first_reward[:, 0], torch.inf)  # return from the root so far, [B]
        self.highest = -self.lowest
        if settings.leaf == "commitment":
            now = torch.full_like(self.episode, time)
            if self.model.box is None:
                returns = returns_after(self.plans, self.filter, cloud.state, now).double()  # [C, B, A, G]
                self.commit(0, self.episode, returns, memory.log_posterior.exp())
            else:
                returns = returns_of(self.plans, self.filter, cloud.state, now).double()[:, :, None]
            self.lowest, self.highest = returns.amin((0, 2, 3)), returns.amax((0, 2, 3))
            self.explore()

    def simulate(self, k: int) -> None:
        """Once through every tree: down to a new node k, its value, and back up."""
        edges, nodes, frontier = self.descend()
        value = torch.zeros(self.B, dtype=torch.float64, device=edges.device)
        if len(frontier.episode):
            value[frontier.episode] = self.expand(k, frontier)
            nodes[frontier.depth, frontier.episode] = k
        self.back_up(edges, nodes, value)

    def descend(self) -> tuple[Tensor, Tensor, Frontier]:
        """Follow UCB1 until a simulation leaves its tree, or meets the horizon or an end.

        Returns:
            The edges taken (indices into `visits.view(-1)`), `[depth, B]`, -1 after the last; the nodes they
            led to, likewise, 0 for none; and where simulations left.
        """
        tree, B, J = self.tree, self.B, self.J
        first_of, in_play_of = tree.first.view(-1), tree.in_play.view(-1)
        alike, distinct, children = tree.alike.view(-1), tree.distinct.view(-1), tree.children.view(-1)
        node = torch.zeros_like(self.episode)
        inside = torch.ones_like(self.episode, dtype=torch.bool)
        over, path = None if tree.over is None else torch.zeros_like(inside), []
        for _ in range(self.steps):  # whoever has left begins again at the root, and leaves no trace there
            at = torch.add(self.episode, node, alpha=B)
            action, n = self.most_promising(at)
            edge = torch.add(action, at, alpha=self.A)
            first = first_of[edge]
            home = torch.add(
                self.episode, first, alpha=B
            )  # the root's, on a first visit: it is nobody's child
            in_play = in_play_of[home]
            widened = (distinct[torch.add(in_play, home, alpha=J + 1)] <= self.limit[n]) & inside
            in_play_of[home] = in_play + widened
            # A new outcome, if one is due; otherwise those in play take turns.
            turn = torch.where(widened, in_play, n % in_play.clamp(min=1))
            outcome = alike[torch.add(turn, home, alpha=J)]
            child = children[torch.add(outcome, home, alpha=J)] * inside
            path.append(torch.stack([node, action, first, outcome, child, edge.where(inside, -1)]))
            inside, node = child > 0, child
            if over is not None and tree.over is not None:
                over |= tree.over.view(-1)[torch.add(self.episode, child, alpha=B)]  # no root is
                inside &= ~over
                node = node * inside
            if not bool(inside.any()):
                break
        nodes, actions, firsts, outcomes, followed, edges = torch.stack(path, 1)  # each [depth, B]
        depth = (followed > 0).sum(0)  # of the last node inside, or of the horizon
        left = depth < self.steps if over is None else (depth < self.steps) & ~over
        b = left.nonzero()[:, 0]
        depth = depth[b]
        frontier = Frontier(
            b, nodes[depth, b], actions[depth, b], firsts[depth, b], outcomes[depth, b], depth
        )
        return edges, followed, frontier

    def most_promising(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The action of the highest confidence bound, untried ones first, and its visits, `[B]` each.

        Of continuous actions, out of those in play.
        """
        visits = self.tree.visits.view(-1, self.A).index_select(0, at)  # [B, A]
        log_total = visits.sum(1, keepdim=True).log_().clamp_(min=TINY)  # over 0 visits it must be ∞
        bonus = (log_total / visits).sqrt_().mul_(self.exploration)
        bound = bonus.add_(self.tree.values.view(-1, self.A).index_select(0, at))
        if self.tree.drawn is not None:
            last = self.last_action[visits.sum(1, keepdim=True).long()]  # [B, 1]
            bound.masked_fill_(self.numbers > last, -torch.inf)
        action = bound.argmax(1, keepdim=True)
        return action[:, 0], visits.gather(1, action)[:, 0].long()

    def expand(self, k: int, frontier: Frontier) -> Tensor:
        """Add a node k where simulations left their trees. Returns its value, `[R]`."""
        tree, (b, node, a) = self.tree, (frontier.episode, frontier.node, frontier.action)
        cell = (node * self.C + torch.arange(self.C, device=b.device)[:, None]) * self.B + b  # [C, R]

        def belief_at(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 2).index_select(0, cell.view(-1)).view(*cell.shape, *leaf.shape[3:])

        cloud = map_belief(belief_at, tree.belief)
        before = tree.log_posterior[node, b]  # [R, C]
        self.open(k, frontier, cloud, before)
        first = torch.where(frontier.first > 0, frontier.first, k)
        action = tree.action(node, b, a)
        seen = Observed.at(
            self.time + 1,
            action,
            {site: values[first, b, frontier.outcome] for site, values in tree.observations.items()},
            {site: flags[first, b, frontier.outcome] for site, flags in tree.observed.items()},
        )
        p = before.exp()
        reward = (p * self.filter.expected_reward(cloud, action).T).sum(1)
        reward = torch.where(node > 0, reward, self.first_reward[b, a])
        cloud, increment = self.filter.step(cloud, seen)
        after = conditioned(before, increment.T)
        if self.settings.temperature > 0:
            gain = torch.special.entr(p).sum(1) - torch.special.entr(after.exp()).sum(1)
            worth = torch.full_like(gain, self.model.discount).pow(self.time + frontier.depth)
            reward += self.settings.temperature * gain / worth

        map_belief(lambda kept, leaf: kept[k].index_copy_(1, b, leaf), tree.belief, cloud)
        tree.log_posterior[k].index_copy_(0, b, after)
        tree.reward[k].index_copy_(0, b, reward)
        tree.depth[k].index_copy_(0, b, frontier.depth + 1)
        tree.children[first, b, frontier.outcome] = k
        time, over = self.time + 1 + frontier.depth, None
        if tree.over is not None:
            over = ended_in(seen.observations, seen.observed)
            tree.over[k].index_copy_(0, b, over)
        if tree.drawn is not None and self.model.box is not None:
            tree.drawn[k].index_copy_(0, b, spread_in(self.model.box, len(b), self.A, b.device))
        return self.value(k, b, cloud, after.exp(), time, over)

    def open(self, k: int, frontier: Frontier, cloud: Cloud, log_posterior: Tensor) -> None:
        """Draw the outcomes of edges that were never visited, all that can ever be needed of them."""
        rows = (frontier.first == 0).nonzero()[:, 0]
        if not len(rows):
            return
        tree, b = self.tree, frontier.episode[rows]
        states, contexts = cloud.draw_jointly(log_posterior[rows], rows, self.J)
        action = tree.action(frontier.node[rows], b, frontier.action[rows])
        percept = self.programs.step(states, action.repeat_interleave(self.J, 0), contexts).percept
        numbers = []
        for kept, fresh in ((tree.observations, percept.observations), (tree.observed, percept.observed)):
            for site, values in fresh.items():
                values = values.view(-1, self.J, *values.shape[1:])
                kept[site][k].index_copy_(0, b, values)
                numbers.append(values.reshape(len(rows), self.J, -1).double())
        alike = first_alike(torch.cat(numbers, 2))  # [R, J]
        tree.alike[k].index_copy_(0, b, alike)
        new = alike == torch.arange(self.J, device=b.device)
        tree.distinct[k, :, 1 : self.J].index_copy_(0, b, new.cumsum(1)[:, :-1])
        tree.in_play[k].index_fill_(0, b, 1)
        tree.first[frontier.node[rows], b, frontier.action[rows]] = k

    def value(
        self, k: int, b: Tensor, cloud: Cloud, posterior: Tensor, time: Tensor, over: Tensor | None
    ) -> Tensor:
        """What the nodes k of some episodes `[R]` are worth, `[R]`: nothing where the episode is over."""
        value = torch.zeros(len(time), dtype=torch.float64, device=time.device)
        going_on = time < self.model.horizon if over is None else (time < self.model.horizon) & ~over
        rows = going_on.nonzero()[:, 0]
        if not len(rows):
            return value
        if len(rows) < len(time):
            cloud = map_belief(lambda leaf: leaf.index_select(1, rows), cloud)
            b, posterior, time = b[rows], posterior[rows], time[rows]
        states = cloud.spread(self.settings.leaf_particles)
        if self.settings.leaf == "commitment" and self.model.box is None:
            returns = returns_after(self.plans, self.filter, states, time).double()
            return value.index_copy_(0, rows, self.commit(k, b, returns, posterior))
        return value.index_copy_(0, rows, self.leaf_value(states, posterior, time).double())

    def commit(self, k: int, b: Tensor, returns: Tensor, posterior: Tensor) -> Tensor:
        """Value nodes k of episodes `[R]` by the best action and commitment; an action's value is a visit.

        `returns` `[C, R, A, G]` are what each plan earns after every action; `posterior` is `[R, C]`.
        """
        worth = torch.einsum("rc,crag->rag", posterior, returns).amax(2)  # [R, A]
        self.tree.visits[k].index_fill_(0, b, 1.0)
        self.tree.values[k].index_copy_(0, b, worth)
        return worth.amax(1)

    def explore(self) -> None:
        """Set UCB1's constant by how far apart returns are, unless it was given."""
        if self.settings.exploration is None:
            self.exploration = (SPREAD * (self.highest - self.lowest)).clamp_(min=TINY)[:, None]

    def leaf_value(self, states: Any, posterior: Tensor, time: Tensor) -> Tensor:
        """What beliefs are worth, `[R]`, by states `[C, R, M, …]`, posterior `[R, C]` and time `[R]`."""
        leaf, R, M = self.settings.leaf, len(time), self.settings.leaf_particles
        if callable(leaf):
            value = leaf(states, posterior, time)
            right = isinstance(value, Tensor) and value.shape == (R,)
            require(right, "leaf", getattr(value, "shape", value), f"values of shape [{R}]")
            return value
        if leaf == "rollout":  # every particle takes actions of its own
            alone = map_state(lambda x: x.reshape(self.C, R * M, 1, *x.shape[3:]), states)
            returns = play(
                self.filter, alone, time.repeat_interleave(M), lambda t: random_actions(self.model, t.shape)
            )
            return (posterior * returns.view(self.C, R, M).mean(2).T).sum(1)
        returns = returns_of(self.plans, self.filter, states, time)  # [C, R, G]
        if leaf == "commitment":
            return torch.einsum("rc,crg->rg", posterior, returns.to(posterior)).amax(1)
        return (posterior * returns.amax(2).T).sum(1)

    def back_up(self, edges: Tensor, nodes: Tensor, value: Tensor) -> None:
        """Count the simulations, and average their returns, on all edges `[depth, B]` that they took."""
        tree = self.tree
        rewards = tree.reward[nodes, self.episode]  # 0 after the last: the root has none
        taken = edges >= 0
        returns = returns_to_come(rewards, value, taken, self.model.discount)  # [depth, B]
        self.lowest, self.highest = self.lowest.minimum(returns[0]), self.highest.maximum(returns[0])
        self.explore()
        edge, returns = edges[taken], returns[taken]
        visits, values = tree.visits.view(-1), tree.values.view(-1)
        n, mean = visits[edge] + 1, values[edge]  # no edge is taken twice: time goes on
        visits[edge] = n
        values[edge] = mean + (returns - mean) / n


def returns_to_come(rewards: Tensor, value: Tensor, taken: Tensor, discount: float) -> Tensor:
    """What simulations earn from every step on, `[depth, B]`, with a value `[B]` after the last one taken.

    Rewards `[depth, B]` are 0 where no step was taken.
    """
    if discount == 1:
        return rewards.flip(0).cumsum(0).flip(0) + value
    returns = torch.empty_like(rewards)
    for d in reversed(range(len(rewards))):
        value = torch.where(taken[d], rewards[d] + discount * value, value)
        returns[d] = value
    return returns


def require_widening(argument: str, pair: Any) -> None:
    """Raise unless it is a pair (k, α) that makes sense."""
    proper = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    require(proper, argument, pair, "a pair (k, α)")
    k, alpha = pair
    require_number(argument, k, "a pair (k, α) with k positive", above=0.0)
    require_number(argument, alpha, "a pair (k, α) with α from 0 to 1")
    require(alpha <= 1, argument, pair, "a pair (k, α) with α from 0 to 1")


def most_actions(settings: PFT) -> int:
    """How many actions A a node may have: those of the model, or as many as can come into play."""
    if settings.model.box is None:
        return settings.model.num_actions
    k, alpha = settings.action_widening
    S = settings.num_simulations
    return int(min(S, math.floor(k * S**alpha) + 1))


def spread_in(box: Box, R: int, A: int, device: torch.device) -> Tensor:
    """A actions for each of R nodes, `[R, A, D]`: each is uniform, and the first few are well spread.

    An additive sequence by the root of `x^{D + 1} = x + 1`; in one dimension, that is the golden ratio.
    """
    D, root = box.dim, 2.0
    for _ in range(40):  # a contraction by more than 2 each time
        root = (1 + root) ** (1 / (D + 1))
    strides = torch.tensor([root**-d for d in range(1, D + 1)], dtype=torch.float64, device=device)
    first = torch.rand(R, 1, D, dtype=torch.float64, device=device)
    shares = (first + torch.arange(A, device=device)[:, None] * strides) % 1
    low, high = box.bounds(torch.zeros((), device=device))
    return (low + (high - low) * shares).to(low)


def most_outcomes(settings: PFT, signature: Signature) -> int:
    """How many outcomes J to draw for an edge.

    As many as can come into play, if no two are equal. Where some may be, they take no room in the tree, and
    more of them tell better how likely each is.
    """
    k, alpha = settings.widening
    S, sites = settings.num_simulations, signature.observations.values()
    discrete = all(site.is_discrete for site in sites)
    return int(min(S, max(math.floor(k * S**alpha) + 1, DISCRETE_OUTCOMES if discrete else 1)))


def first_alike(outcomes: Tensor) -> Tensor:
    """The number of the first outcome that is equal to each, `[R, J]`, of outcomes `[R, J, n]`."""
    R, J, n = outcomes.shape
    key = outcomes[..., 0]
    if n > 1:  # a random projection tells outcomes apart
        key = (outcomes * torch.rand(n, dtype=outcomes.dtype, device=outcomes.device)).sum(2)
    key, order = key.sort(dim=1, stable=True)
    place = torch.arange(J, device=key.device).expand(R, J)
    begins = torch.where(key.diff(dim=1) == 0, 0, place[:, 1:])  # where a run of equal ones does
    begins = torch.cat([place[:, :1], begins], 1).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, begins))
