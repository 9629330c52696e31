"""Who may write which key of etcd."""

from __future__ import annotations

OWN, OTHER, INSTANCE = (f'{digit * 8}-0000-4000-8000-000000000000' for digit in '123')

# (may the compute OWN write it, may a scheduler write it). An operator may write all, and all users may read them.
WRITERS_BY_KEY = {
    f'/hosts/{OWN}/{INSTANCE}': (True, True),
    f'/hosts/{OTHER}/{INSTANCE}': (False, True),
    f'/hosts/{OWN}': (False, True),
    f'/hosts/{OWN}0': (False, True),
    f'/instances/{OWN}/{INSTANCE}': (True, True),
    f'/instances/{OTHER}/{INSTANCE}': (False, True),
    f'/usage/{OWN}': (True, False),
    f'/usage/{OTHER}': (False, False),
    f'/computes/{OWN}': (True, False),
    f'/computes/{OWN}/x': (False, False),
    f'/computes/{OWN}0': (False, False),
    f'/computes/{OTHER}': (False, False),
    f'/hostnames/{OWN}': (True, True),
    f'/hostnames/{OWN}/x': (False, True),
    f'/hostnames/{OTHER}': (False, True),
    f'/accepted/{OWN}': (True, False),
    f'/accepted/{OTHER}': (False, False),
    f'/facts/{OWN}': (True, False),
    f'/facts/{OTHER}': (False, False),
    f'/troubles/{OWN}': (True, False),
    f'/troubles/{OTHER}': (False, False),
    f'/findings/{OWN}': (True, False),
    f'/foreign/{OWN}': (True, False),
    f'/findings/{OTHER}': (False, False),
    f'/booted/{INSTANCE}': (True, True),
    f'/queues/f/{INSTANCE}': (True, True),
    f'/queues/f/{INSTANCE}/taker': (True, True),
    '/names/web': (True, True),
    '/groups/web': (True, True),
    '/quotas/p': (True, True),
    '/stacks/shop': (False, True),
    '/released/ab/1': (True, True),
    f'/requests/{INSTANCE}': (False, True),
    '/user-data/ab': (True, True),
    '/audit/a': (False, True),
    f'/audit/a/{OWN}': (False, True),
    '/flavors/small': (False, False),
    '/cluster': (False, False),
    '/anything': (False, False),
}
