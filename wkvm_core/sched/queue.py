"""Who is admitted next: priority first, then the tenant that got the least service, then order of arrival."""

from __future__ import annotations

from collections import deque

from wkvm_core.sched.sequence import Phase, Sequence


class FairQueue:
    """Waiting sequences. Within a priority, tenants share by virtual time: tokens served, and a tenant that comes back
    from idleness starts level with the least served active one, neither in debt nor in credit."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, deque[Sequence]]] = {}
        self._served: dict[str, float] = {}
        self._floor = 0.0
        self._size = 0
        self._dead = 0

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Adds a sequence behind (or, with `front`, before) the others of its tenant and priority."""
        tenant = sequence.request.tenant
        line = self._lines.setdefault(sequence.request.priority, {}).setdefault(tenant, deque())
        if front:
            line.appendleft(sequence)
        else:
            line.append(sequence)
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._size += 1

    def peek(self) -> Sequence | None:
        """The next one; None when nobody waits. Sequences that ended while they waited are dropped on the way."""
        while self._lines:
            priority = max(self._lines)
            lines = self._lines[priority]
            tenant = min(lines, key=self.served)
            line = lines[tenant]
            while line and line[0].phase is not Phase.WAITING:
                line.popleft()
                self._dead -= 1
            if line:
                self._floor = max(self._floor, self.served(tenant))
                return line[0]
            del lines[tenant]
            if not lines:
                del self._lines[priority]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting one out: the next one, or another out of turn."""
        self._lines[sequence.request.priority][sequence.request.tenant].remove(sequence)
        self._size -= 1

    def forget(self) -> None:
        """One sequence ended while it waited; its place is dropped when it is met, or when such places pile up."""
        self._size -= 1
        self._dead += 1
        if self._dead > self._size + 64:
            for lines in self._lines.values():
                for tenant, line in lines.items():
                    lines[tenant] = deque(s for s in line if s.phase is Phase.WAITING)
            self._dead = 0

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens were read or sampled for a tenant."""
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor) + tokens

    def depart(self, tenant: str) -> None:
        """A tenant has no request left: neither debt nor credit of it is kept."""
        self._served.pop(tenant, None)

    def served(self, tenant: str) -> float:
        """Virtual time of a tenant."""
        return self._served.get(tenant, self._floor)
