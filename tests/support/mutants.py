"""Plant faults into a copy of the sources, one at a time, and say which test sees each.

    python tests/support/mutants.py [--all] [NAME ...]

Every fault is first shown to the fast tests of its files and, where they miss it, to their slow
tests; `--all` starts with the slow ones as well. Ends with status 1 if a fault survives. The
libraries are imported once; every fault gets a process of its own.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fault_runner import FAST, SLOW, copy_sources, seen_by, warm


@dataclass(frozen=True)
class Fault:
    """A change of one place in a source file, and the tests that must see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


VERIFY = ("decoding/test_verification.py", "exactness/test_laws.py")
PROBABILITIES = ("decoding/test_probabilities.py", "exactness/test_tables.py")
STANDARD = ("rules/test_standard.py", "exactness/test_laws.py", "exactness/test_tables.py")
OPTIMAL = ("rules/test_optimal.py", "exactness/test_laws.py")
PRICES = ("rules/test_optimal_prices.py",)
STREAMS = ("decoding/test_random_streams.py", "decoding/test_loop.py")
LOOP = ("decoding/test_loop.py", "exactness/test_laws.py")
NEIGHBOURS = ("rules/test_neighbourhood.py", "exactness/test_laws.py")
BLOCK = ("rules/test_standard_block.py", "exactness/test_laws.py")
STATIC = ("drafters/test_static_tree.py", "exactness/test_laws.py")
DYNAMIC = ("drafters/test_dynamic_tree.py", "exactness/test_laws.py")
JACOBI = ("drafters/test_jacobi.py", "exactness/test_laws.py")
EAGLE = (
    "drafters/test_eagle.py",
    "drafters/test_eagle_dynamic.py",
    "drafters/test_eagle_network.py",
)
PARALLEL = ("drafters/test_parallel.py", "training/test_teacher_forcing.py")
TARGET = ("targets/test_transformer.py", "targets/test_cache.py", "drafters/test_eagle.py")
TAPE = ("decoding/test_tape.py",)
SHORTENING = ("decoding/test_tape_shortening.py",)
CALLING = ("decoding/test_tape_calling.py",)
LLAMAGEN = ("targets/test_llamagen.py",)
TRAINING = ("training/test_teacher_forcing.py", "training/test_losses.py")
TRAINER = ("training/test_trainer.py",)
CONTINUOUS = ("exactness/test_laws.py", "continuous/test_mar.py", "exactness/test_gaussians.py")

FAULTS = (
    Fault("one-hot siblings tested against the whole of p", "decoding/verification.py",
          "given = torch.where(left > 0, here / left, here)", "given = here",
          ("decoding/test_verification.py",)),
    Fault("a rejected one-hot proposal stays in the residual", "decoding/verification.py",
          "rejected = (1 + tree.parents == stop", "rejected = (1 + tree.parents > stop",
          ("decoding/test_verification.py",)),
    Fault("the residual without clamp", "decoding/probabilities.py",
          "return normalise((p - kept).clamp(min=0), otherwise=p)",
          "return normalise(p - kept, otherwise=p)", STANDARD),
    Fault("the residual is p", "decoding/probabilities.py",
          "return normalise((p - kept).clamp(min=0), otherwise=p)", "return p", STANDARD),
    Fault("a price for every depth but its own", "rules/optimal.py",
          "prices[(depth - 1).clamp(", "prices[depth.clamp(", OPTIMAL),
    Fault("the residual of least KL is G*", "rules/optimal.py",
          "return normalise((c * p - kept).clamp(min=0), otherwise=p)",
          "return normalise((p - kept).clamp(min=0), otherwise=p)", OPTIMAL),
    Fault("the replacement without its scale", "rules/optimal.py",
          "return normalise((c * p - q).clamp(min=0), otherwise=p)",
          "return normalise((p - q).clamp(min=0), otherwise=p)", OPTIMAL),
    Fault("few halvings", "rules/optimal.py", "HALVINGS = 20", "HALVINGS = 4", OPTIMAL),
    Fault("a kept draft is worth its tokens alone", "rules/optimal_prices.py",
          "value = torch.zeros_like(keep), beta - divergence",
          "value = torch.zeros_like(keep), beta - 0 * divergence", PRICES),
    Fault("a rejected sibling leaves nothing", "rules/optimal_prices.py",
          "gain[child] = value[1 + child] - rest", "gain[child] = value[1 + child]", PRICES),
    Fault("vanilla for optimal residuals", "rules/standard.py",
          'if self.residual_kind == "vanilla":\n            return excess',
          "if True:\n            return excess", STANDARD),
    Fault("ω of one depth further", "rules/standard.py",
          "place = depth.clamp(", "place = (depth + 1).clamp(", STANDARD),
    Fault("u ≤ f for u < f", "decoding/verification.py",
          "stop = tree.walk(draws < f)", "stop = tree.walk(draws <= f)", VERIFY),
    Fault("siblings tested against p, not its residual", "decoding/verification.py",
          "put(laws, test.parents, target)", "target = take(laws, test.parents)", VERIFY),
    Fault("forced positions are no longer kept", "decoding/verification.py",
          "f = torch.where(at(target, token) >= 1, 1.0, f)", "pass", VERIFY),
    Fault("the replacement of one depth less", "decoding/verification.py",
          "tree.depth_at(stop) + 1", "tree.depth_at(stop).clamp(min=1)", VERIFY),
    Fault("the bonus token from the root's row", "decoding/verification.py",
          "draft.tree, take_one(laws, stop)", "draft.tree, take_one(laws, 0 * stop)", VERIFY),
    Fault("the replacement is drawn from p", "decoding/verification.py",
          "return torch.where(is_leaf.unsqueeze(-1), law, residual)", "return law", VERIFY),
    Fault("guidance with the rows exchanged", "decoding/probabilities.py",
          "conditional, unconditional = logits.chunk(2)",
          "unconditional, conditional = logits.chunk(2)", PROBABILITIES),
    Fault("ties of top-k dropped", "decoding/probabilities.py",
          "less = logits.detach().clone().lt_(least)",
          "less = ((logits <= least) & (logits < logits.amax(-1, keepdim=True))).float()",
          PROBABILITIES),
    Fault("the token that reaches top-p dropped", "decoding/probabilities.py",
          "ranked.cumsum(-1) - ranked >= self.top_p", "ranked.cumsum(-1) >= self.top_p",
          PROBABILITIES),
    Fault("forced positions ignored", "decoding/probabilities.py",
          "if forced is not None:", "if False:", PROBABILITIES),
    Fault("q of siblings not renormalised", "decoding/probabilities.py",
          "p = normalise(p.scatter(-1, tokens[-1].unsqueeze(-1), 0.0), otherwise=p)",
          "p = p.scatter(-1, tokens[-1].unsqueeze(-1), 0.0)", (*PROBABILITIES, *STATIC)),
    Fault("siblings drawn with replacement", "decoding/probabilities.py",
          "p = normalise(p.scatter(-1, tokens[-1].unsqueeze(-1), 0.0), otherwise=p)",
          "pass", (*PROBABILITIES, *STATIC)),
    Fault("0/0 counts as 0", "decoding/probabilities.py",
          "torch.fmin(p / q, torch.ones(", "torch.fmin((p / q).nan_to_num(0), torch.ones(",
          STANDARD),
    Fault("every row has the first row's stream", "decoding/random_streams.py",
          "[key(seed, name) for name in ids]", "[key(seed, ids[0]) for name in ids]", STREAMS),
    Fault("a draw is used twice", "decoding/random_streams.py",
          "self._block[:, :count], self._block[:, count:]",
          "self._block[:, :count], self._block[:, max(0, count - 1):]", STREAMS),
    Fault("rows run past the image", "decoding/loop.py",
          "torch.minimum(verdict.accepted + 1, self.length - self.lengths)",
          "torch.minimum(verdict.accepted + 1, 1 + self.length - self.lengths)", LOOP),
    Fault("the drafter's draws also verify", "decoding/loop.py",
          "uniforms[:, drafter.uniforms :], scores.soft", "uniforms, scores.soft", LOOP),
    Fault("block verification cuts w at the end only", "rules/standard.py",
          "steps - steps.cummax(-1).values", "steps.clamp(max=0)", BLOCK),
    Fault("block verification keeps the shortest prefix", "rules/standard.py",
          "kept = (tree.depths * (uniforms[:, : tree.nodes] < passing)).amax(-1)",
          "kept = (uniforms[:, : tree.nodes] < passing).int().cumprod(-1).sum(-1)", BLOCK),
    Fault("δ of LANTERN counts with equality", "rules/neighbourhood.py",
          ") < self.delta", ") <= self.delta + 0.05", NEIGHBOURS),
    Fault("LANTERN++ takes λ - 1", "rules/neighbourhood.py",
          "moved < self.lam * own", "moved < (self.lam - 1) * own", NEIGHBOURS),
    Fault("GSD's groups one rank wider", "rules/neighbourhood.py",
          "<= self.ranks\n", "<= self.ranks + 1\n", NEIGHBOURS),
    Fault("a neighbour stands in for a forced token", "rules/neighbourhood.py",
          "free = (p.amax(-1, keepdim=True) < 1).expand(shape)",
          "free = (p.amax(-1, keepdim=True) < 2).expand(shape)", NEIGHBOURS),
    Fault("a static tree's first sibling is every sibling", "drafters/static_tree.py",
          "laws.append(q)", "laws.append(q[:, :1].expand_as(q))", STATIC),
    Fault("dynamic trees keep the candidates drawn first", "drafters/dynamic_tree.py",
          "best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.nodes]",
          "best = scores.cumsum(-1).argsort(dim=-1, descending=True)[:, : self.nodes]", DYNAMIC),
    Fault("EAGLE-2 ranks by the target's top-k", "decoding/probabilities.py",
          "temperature=self.temperature or 1.0, top_k=0, top_p=1.0",
          "temperature=self.temperature or 1.0", EAGLE),
    Fault("EAGLE's draft is not cut at the target's top-k", "drafters/eagle.py",
          "sampling = self.sampling_of(self.head.sampling)",
          "sampling = self.head.sampling.ranking", EAGLE),
    Fault("greedy trees draft the token that EAGLE's draft would draw", "drafters/static_tree.py",
          "if self.model.greedy:", "if False:", STATIC),
    Fault("greedy siblings start with the least probable one", "decoding/probabilities.py",
          "top = p.topk(min(count, p.shape[-1]), -1)",
          "top = p.topk(min(count, p.shape[-1]), -1, largest=False)", STATIC),
    Fault("EAGLE reads predicted hidden states again", "drafters/hidden_state_draft.py",
          "self._true = verdict.tokens, hidden, emitted",
          "self._true = verdict.tokens, torch.zeros_like(hidden), emitted", EAGLE),
    Fault("EAGLE's hidden states of a tree in tree order", "drafters/hidden_state_draft.py",
          "if not draft.tree.is_chain:", "if False:", EAGLE),
    Fault("EAGLE's positions off by one", "drafters/eagle.py",
          "self._places.first[:, None] + self._ahead)",
          "self._places.first[:, None] + self._ahead + 1)", EAGLE),
    Fault("a slot's Markov head reads no token", "drafters/parallel.py",
          "logits = logits + first[tokens] @ second", "logits = logits + first[:1] @ second",
          PARALLEL),
    Fault("masks in place of accepted tokens", "drafters/parallel.py",
          "self._steps < emitted[:, None]", "self._steps < emitted[:, None] - 1", PARALLEL),
    Fault("all slots draft what the first one does", "drafters/parallel.py",
          "self._logits[:, level.depth : level.depth + 1]", "self._logits[:, :1]", PARALLEL),
    Fault("slots start one behind the root", "drafters/cache_slots.py",
          "places = last[:, None] + torch.arange(count",
          "places = 0 * last[:, None] + torch.arange(count", PARALLEL),
    Fault("hidden states not shifted", "drafters/eagle_network.py",
          "[hidden.new_zeros(len(hidden), 1, hidden.shape[-1]), real, hidden[:, covered:]], 1",
          "[real, hidden[:, covered:], hidden.new_zeros(len(hidden), 1, hidden.shape[-1])], 1",
          EAGLE),
    Fault("a replaced guess is drawn from q", "drafters/jacobi.py",
          "excess(q, old), q)", "q, q)",
          (*JACOBI, "drafters/test_jacobi_window.py")),
    Fault("the last window is read one place on", "drafters/jacobi.py",
          "self._reading.gather(1, places.clamp(0, length))",
          "self._reading.gather(1, (places + 1).clamp(0, length))", JACOBI),
    Fault("no rollback: a row advances by the whole draft", "targets/prompt_state.py",
          "self.root_slots.view(self.copies, -1).add_(emitted)",
          "self.root_slots.view(self.copies, -1).add_(most)", TARGET),
    Fault("compaction skipped", "targets/transformer.py",
          "if draft.tree.nodes and not draft.tree.is_chain:", "if False:", TARGET),
    Fault("depth off by one", "targets/forward.py",
          "(slots + layout.depths).clamp_(", "(slots + layout.offsets).clamp_(", TARGET),
    Fault("a node sees its siblings", "targets/forward.py",
          "visible[..., 0] = True", "visible[..., :] = True", TARGET),
    Fault("padding is seen", "targets/forward.py",
          "if self._padding is not None:", "if False:", TARGET),
    Fault("a round sees one slot more", "targets/cache.py",
          "_strip[..., capacity:].fill_(", "_strip[..., capacity + width :].fill_(", TARGET),
    Fault("compaction overwrites before it reads", "targets/cache.py",
          "entries.index_select(0, source))", "entries.index_select(0, source).flip(0))", TARGET),
    Fault("rotation of the condition tokens", "targets/llamagen.py",
          "torch.cat([blank, angles.cos()])", "torch.cat([blank + 1, angles.cos()])", LLAMAGEN),
    Fault("rows and columns of the rotation exchanged", "targets/llamagen.py",
          "[rows.flatten()[:, None] * freqs, columns.flatten()[:, None] * freqs]",
          "[columns.flatten()[:, None] * freqs, rows.flatten()[:, None] * freqs]", LLAMAGEN),
    Fault("rotary pairs not permuted", "targets/llamagen.py",
          "permute_pairs(k, heads)\n", "k\n", LLAMAGEN),
    Fault("a plain draw for a rejected state", "continuous/rules.py",
          "torch.where(redrawn.failed.unsqueeze(-1), fresh, redrawn.x)",
          "fresh",
          CONTINUOUS),
    Fault("Σ of CSpD left out", "continuous/rules.py",
          "ratio = before + p.log_density", "ratio = 0 * before + p.log_density", CONTINUOUS),
    Fault("the reflection on the wrong side", "continuous/residual_sampler.py",
          "whitened - 2 * (direction", "whitened + 2 * (direction", CONTINUOUS),
    Fault("noise U(0, a)", "training/teacher_forcing.py",
          ".uniform_(-amplitude, amplitude", ".uniform_(0, amplitude", TRAINING),
    Fault("the best draft is always overwritten", "training/trainer.py",
          'better = metrics["top3"] > progress.best.get("top3", -1.0)', "better = True", TRAINER),
    Fault("accumulated parts are not averaged", "training/trainer.py",
          "parts[TOTAL] / recipe.gradient_accumulation", "parts[TOTAL]", TRAINER),
    Fault("a file is written in place", "runtime/files.py",
          'temporary = path.with_name(f".{path.name}.{_writer()}.tmp")', "temporary = path",
          ("runtime/test_files.py",)),
    Fault("a tape takes memory that is still in use", "decoding/tape.py",
          "if last[number] == index:", "if last[number] >= index:", TAPE),
    Fault("blank memory of a tape is not kept apart", "decoding/tape.py",
          "for number in numbers - offsets.keys():", "for number in numbers:", TAPE),
    Fault("unwritten memory of a tape is not planned", "decoding/tape.py",
          "                self._place(blank)\n", "                pass\n", TAPE),
    Fault("a recorded Jacobi round keeps the first guesses", "drafters/jacobi.py",
          "self._guesses = Guesses(*tensors[6:8])", "pass", TAPE),
    Fault("streams pass over the draws of a first round twice", "decoding/loop.py",
          "first + (rounds - 1) * count()", "rounds * count()", TAPE),
    Fault("a constant of a tape is written to", "decoding/tape_shortening.py",
          "if made.isdisjoint(written) and", "if", SHORTENING),
    Fault("what a step writes to holds constants of its tape", "decoding/tape_shortening.py",
          "changing = written_outside | {", "changing = {",
          SHORTENING),
    Fault("random numbers of a tape are constants", "decoding/tape_shortening.py",
          "changes = call.is_random or not", "changes = not", SHORTENING),
    Fault("an operation on a tape counts as repeated after a write", "decoding/tape_shortening.py",
          "steady = call.storages.isdisjoint(written) and", "steady =", SHORTENING),
    Fault("random numbers of a tape count as repeated", "decoding/tape_shortening.py",
          "if call.made and steady and not call.is_random:", "if call.made and steady:",
          SHORTENING),
    Fault("an operation on a tape that writes to what is read is left out",
          "decoding/tape_shortening.py",
          "results = call.written | {place.storage for place in call.made}",
          "results = {place.storage for place in call.made}", SHORTENING),
    Fault("static memory is written to while it is still read", "decoding/tape_shortening.py",
          "if not touched and not changed:", "if not changed:", SHORTENING),
    Fault("static memory takes what it holds no longer", "decoding/tape_shortening.py",
          "if not touched and not changed:", "if not touched:", SHORTENING),
    Fault("static memory changes with what was copied to it", "decoding/tape_shortening.py",
          "address in other.written_outside or place.storage in other.written",
          "address in other.written_outside", SHORTENING),
    Fault("a part of a storage is made in place as if it were all of it",
          "decoding/tape_shortening.py",
          "memory.storage_offset() == 0 and memory.nbytes == sizes[place.storage]",
          "memory.storage_offset() == 0", SHORTENING),
    Fault("an operation of a tape takes another overload", "decoding/tape_calling.py",
          "if ear.heard == script_of(function, args, kwargs):", "if ear.heard:", CALLING),
    Fault("one overload serves all arguments in a tape", "decoding/tape_calling.py",
          "kinds = function, str(mapped(_kind, [args, kwargs], object))",
          "kinds = function.overloadpacket, \"\"", CALLING),
    Fault("a number on a tape takes its tensor's dtype", "decoding/tape_calling.py",
          "torch.int64: (int,)}", "torch.int64: (int, float)}", CALLING),
    Fault("a tape's where takes its numbers in the other order", "decoding/tape_calling.py",
          "return _as_where(made, mask, value, x)", "return _as_where(made, mask, x, value)",
          CALLING),
    Fault("a round that reads is replayed", "decoding/tape.py",
          "self.repeats &= not _reads(function, args)", "pass", TAPE),
    Fault("a round with a Python value that changes is replayed", "decoding/tape.py",
          "if heard.repeats and agrees and", "if heard.repeats and", TAPE),
    Fault("one more than k logits kept", "decoding/kth_largest.py",
          "place = x.shape[-1] - k", "place = x.shape[-1] - k - 1",
          ("decoding/test_kth_largest.py",)),
    Fault("what top-k excludes keeps its logit", "decoding/probabilities.py",
          "alpha=-torch.finfo(logits.dtype).max", "alpha=0.0", PROBABILITIES),
    Fault("bonus tokens called resampled", "decoding/running_trace.py",
          "at_stop(tree.last_children, stops) < 0", "at_stop(tree.last_children, stops) < -1",
          ("decoding/test_running_trace.py",)),
    Fault("rounds begin after accepted tokens", "decoding/running_trace.py",
          "origin[:, :-1] != ACCEPTED", "origin[:, :-1] == ACCEPTED",
          ("decoding/test_running_trace.py",)),
    Fault("the second row's entries from the first row", "decoding/trees.py",
          "places = (starts.unsqueeze(1) + index)", "places = (0 * starts.unsqueeze(1) + index)",
          ("decoding/test_trees.py", "decoding/test_verification.py")),
    Fault("a chain's walk ends at its last failure", "decoding/trees.py",
          "first_failed.amin(-1)", "first_failed.amax(-1)", VERIFY),
    Fault("stale distributions read along the first path", "drafters/jacobi.py",
          "self.shape.reading[verdict.stop]", "self.shape.reading[0 * verdict.stop]", JACOBI),
    Fault("top-k without NumPy", "decoding/kth_largest.py",
          "x.numel() >= FEW", "x.numel() < 0", ("decoding/test_kth_largest.py",)),
    Fault("a chain without a token has no walk", "decoding/trees.py",
          "first_failed.amin(-1) if self.nodes else", "first_failed.amin(-1) if True else",
          ("decoding/test_trees.py",)),
    Fault("the first root's embedding is a token's", "targets/transformer.py",
          "embeds = torch.cat([self._first_root, embeds[:, 1:]], 1)", "pass", TARGET),
    Fault("x > y as x < y", "decoding/tape_calling.py",
          "binary(made, other, x)", "binary(made, x, other)", CALLING),
    Fault("NumPy reads unseen", "decoding/tape.py",
          "(Tensor.tolist, Tensor.numpy, Tensor.__array__)", "()", TAPE),
    Fault("results of a replay are not copied", "decoding/tape_calling.py",
          "(lambda: made[0].copy_(results()))", "results", (*TAPE, *CALLING)),
    Fault("a round runs after the last one on a CPU", "decoding/tape.py",
          "runs_ahead = False", "runs_ahead = True", TAPE),
    Fault("keys and values in one place", "targets/cache.py",
          "view(2, rows, heads, 1)", "view(rows, 2, heads, 1).transpose(0, 1)", TARGET),
)  # fmt: skip


def plant(fault: Fault, place: Path) -> Path:
    """Copy the sources, plant the fault, and return the copy. Raises SystemExit where its place is
    gone.
    """
    sources = copy_sources(place)
    file = sources / "tempera" / fault.file
    text = file.read_text(encoding="utf-8")
    if fault.right not in text:
        sys.exit(f"{fault.name}: `{fault.right}` no longer stands in {fault.file}")
    file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of the names of the faults to plant")
    parser.add_argument("--all", action="store_true", help="show every fault to the slow tests too")
    options = parser.parse_args()
    warm()
    survivors = []
    for fault in FAULTS:
        if options.names and not any(name in fault.name for name in options.names):
            continue
        with tempfile.TemporaryDirectory() as directory:
            sources = plant(fault, Path(directory))
            fast = None if options.all else seen_by(fault.tests, sources, FAST)
            slow = fast or seen_by(fault.tests, sources, SLOW)
        print(
            f"{'fast' if fast else 'slow' if slow else 'LOST':4}  {fault.name}: {slow}", flush=True
        )
        survivors += [] if slow else [fault.name]
    sys.exit(f"{len(survivors)} faults survive: {'; '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
