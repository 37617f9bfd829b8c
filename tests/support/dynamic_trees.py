"""Trees of a dynamic drafter, as its tests look at them."""

import math

from tiny_networks import node_paths


def grown(law, branches, depth, nodes):
    """EAGLE-2's tree by its definition, as paths of tokens: `law` gives the distribution after a
    path.
    """

    def best(candidates, count):
        return sorted(candidates, key=lambda candidate: -candidate[1])[:count]

    def children(path, score):
        p = law(path)
        return best([((*path, x), score + math.log(p[x])) for x in range(len(p))], branches)

    level = found = children((), 0.0)
    for _ in range(1, depth):
        level = [child for path, score in best(level, branches) for child in children(path, score)]
        found = found + level
    return best(found, nodes)


def token_paths(draft, row):
    return [tuple(draft.tokens[row, path].tolist()) for path in node_paths(draft.tree, row)[1:]]
