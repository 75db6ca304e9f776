"""The smallest worlds in which the lack of a mechanism shows, by mechanism."""

from tests.model.world import Budget

SMALL = {
    "fence": {"workers": 2, "jobs": 1, "tokens": 2, "budget": Budget(0, 1, 0, 0)},
    "incarnation": {"workers": 2, "jobs": 1, "tokens": 2, "budget": Budget(0, 1, 0, 0, rollbacks=1)},
    "expected length": {"workers": 1, "jobs": 1, "tokens": 2, "budget": Budget(0, 0, 0, 1)},
    "held list": {"workers": 1, "jobs": 1, "tokens": 1, "budget": Budget(0, 0, 1, 0)},
    "incarnation of a claim": {"workers": 1, "jobs": 1, "tokens": 1, "budget": Budget(1, 0, 0, 0, late_claims=1)},
    "output commit": {"workers": 2, "jobs": 1, "tokens": 2, "budget": Budget(0, 1, 0, 0)},
    "strike reset": {"workers": 1, "jobs": 1, "tokens": 2, "budget": Budget(1, 0, 0, 0)},
}
