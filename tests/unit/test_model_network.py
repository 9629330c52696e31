"""What a guest with several interfaces is told of them."""

from __future__ import annotations

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.guest import MOST_INTERFACES, mac_address, network_config

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def macs(count: int) -> tuple[str, ...]:
    return tuple(mac_address(INSTANCE, number) for number in range(count))


def test_one_interface_needs_no_word() -> None:
    assert network_config(()) is None
    assert network_config(macs(1)) is None


def test_two() -> None:
    first, second = macs(2)
    assert network_config((first, second)) == {
        'version': 2,
        'ethernets': {
            'eth0': {'match': {'macaddress': first}, 'dhcp4': True, 'dhcp4-overrides': {'route-metric': 100}},
            'eth1': {
                'match': {'macaddress': second},
                'dhcp4': True,
                'dhcp4-overrides': {'route-metric': 200},
                'optional': True,
            },
        },
    }


@given(st.integers(2, MOST_INTERFACES))
def test_each_has_its_own_and_the_first_comes_first(count: int) -> None:
    config = network_config(macs(count))
    assert config is not None
    assert yaml.safe_load(json.dumps(config)) == config
    each = list(config['ethernets'].values())
    assert tuple(one['match']['macaddress'] for one in each) == macs(count)
    metrics = [one['dhcp4-overrides']['route-metric'] for one in each]
    assert metrics == sorted(set(metrics))
    assert [one.get('optional', False) for one in each] == [False] + [True] * (count - 1)
