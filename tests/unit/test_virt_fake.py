"""What only the fake does: keep its guests in a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ecomp.errors import EcompError, UsageError
from ecomp.model.guest import BaseImage, Guest, GuestSpec
from ecomp.virt.fake import FakeHypervisor

SPEC = GuestSpec('instance', 'compute', 1, 64, 1, BaseImage('/base', 'qcow2', 1), 'qemu')


def test_guests_outlive_the_process(tmp_path: Path) -> None:
    first = FakeHypervisor(tmp_path)
    first.prepare()
    first.reserve('instance', SPEC.macs[0], 'default')
    first.create_disk(SPEC)
    first.start(SPEC)
    second = FakeHypervisor(tmp_path)
    second.prepare()
    assert second.guests() == {'instance': Guest('instance', 'compute', defined=True, running=True, disk=True)}
    assert second.addresses('instance') == first.addresses('instance')
    assert second.reservations() == first.reservations()
    second.destroy('instance', 'compute')
    second.delete_disk('instance')
    second.release('instance')
    third = FakeHypervisor(tmp_path)
    third.prepare()
    assert third.guests() == {}


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hypervisor = FakeHypervisor()
    hypervisor.prepare()
    hypervisor.create_disk(SPEC)
    hypervisor.start(SPEC)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        *(('fake.json', each) for each in ('', '{', '{}x', '[1]', '[{"instance": "x"}]', '{"a": 1}')),
        *(
            ('fake-reserved.json', each)
            for each in ('', '{', '[1]', 'null', '{"52:54:00:00:00:01": 7}', '{"x": [1, 2, 3]}')
        ),
        *(('fake-seeds.json', each) for each in ('', '{', '7', 'null')),
    ],
)
def test_a_file_that_is_not_ours(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(EcompError, match=rf'{re.escape(name)} .* remove it'):
        FakeHypervisor(tmp_path).prepare()


def test_kvm_is_not_pretended() -> None:
    assert FakeHypervisor().virt_type('auto') == 'qemu'
    with pytest.raises(UsageError):
        FakeHypervisor().virt_type('kvm')


def test_libvirt_is_not_needed() -> None:
    """eschedule's laptop and `ecompute --fake` have no libvirt-python; asking for the real one says what to install."""
    script = """
import sys
sys.modules['libvirt'] = None
import ecomp.virt, ecomp.virt.fake, ecomp.virt.xml, ecomp.virt.image
from ecomp.errors import UsageError
try:
    import ecomp.virt.libvirt_host
except UsageError as error:
    assert f"in a clone of ecomp: {sys.executable} -m pip install '.[hypervisor]'" in str(error), error
else:
    sys.exit('no UsageError')
"""
    subprocess.run([sys.executable, '-c', script], check=True, env={'PYTHONPATH': ':'.join(sys.path)})
