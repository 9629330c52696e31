"""Which URLs an image may be asked for at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.image import check_image, pinned, sum_of

SUM, OTHER = '0123456789abcdef' * 4, 'f' * 64

TAKEN = [
    'http://download.cirros-cloud.net/0.3.6/cirros-0.3.6-x86_64-disk.img',
    'https://cloud-images.ubuntu.com/bionic/current/bionic-server-cloudimg-amd64.img',
    'HTTP://host/x',
    'http://host',
    'http://host:8080/x?y=z',
    f'http://host:8080/x?y=z#sha256={SUM}',
    f'http://host/x#SHA256={SUM.upper()}',
    f'file:///var/images/x.qcow2#sha256={SUM}',
    'http://host/x#',
    'http://host/@x',
    'file:/images/@x',
    'http://host/?user@x',
    'http://[::1]:80/x',
    'http://127.0.0.1/x',
    'http://host/%20',
    'file:///var/images/x.qcow2',
]
REFUSED = [
    ('', 'must be a URL that starts with'),
    ('image.img', 'must be a URL that starts with'),
    ('/var/images/x', 'must be a URL that starts with'),
    ('-f', 'must be a URL that starts with'),
    ('ftp://host/x', 'must be a URL that starts with'),
    ('nbd://host/x', 'must be a URL that starts with'),
    ('json:{"file.filename":"/etc/shadow"}', 'must be a URL that starts with'),
    ('javascript:x', 'must be a URL that starts with'),
    ('file:x', 'must name an absolute path'),
    ('file://x', 'must name an absolute path'),
    ('file://host/x', 'must name an absolute path'),
    ('file:', 'must name an absolute path'),
    ('http:', 'names no host'),
    ('http://', 'names no host'),
    ('http:///x', 'names no host'),
    ('http://:80/x', 'names no host'),
    ('http://host:port/x', 'is not a URL'),
    ('http://host:99999/x', 'is not a URL'),
    ('http://[::1/x', 'is not a URL'),
    ('http://host/a b', 'space or a control character'),
    (' http://host/', 'space or a control character'),
    ('http://host/\n', 'space or a control character'),
    ('http://host/\r\nX: y', 'space or a control character'),
    ('http://host/\x00', 'space or a control character'),
    ('http://host/\x7f', 'space or a control character'),
    ('http://host/\udcff', 'is not a URL'),
    ('http://host/' + 'x' * 2048, 'more than 2048'),
    *((url, '^the image has a user or a password in its URL') for url in (
        'http://user:hunter2@host/x', 'https://user@host/x', 'http://:hunter2@host/x', 'http://@host/x',
        'http://user:hun@ter2@host/x', 'file://user:hunter2@host/x', 'ftp://user:hunter2@host/x', 'hunter2@host',
        'http:user:hunter2@host/x', 'http://user:hunter2@[host/x', 'http://user:hunter2@host:port/x',
        f'http://user:hunter2@host/x#sha256={SUM}', 'http://host\\@user:hunter2@host/x',
    )),
    ('http://host/x?y=z#f', 'has a #fragment that is not #sha256='),
    (f'http://host/x#sha256={SUM[1:]}', 'has a #fragment that is not'),
    (f'http://host/x#sha256={SUM}0', 'has a #fragment that is not'),
    (f'http://host/x#sha256={SUM}#', 'has a #fragment that is not'),
    (f'http://host/x#sha256:{SUM}', 'has a #fragment that is not'),
    (f'http://host/x#sha512={SUM}{SUM}', 'has a #fragment that is not'),
    ('http://host/x#md5=d41d8cd98f00b204e9800998ecf8427e', 'has a #fragment that is not'),
]


@pytest.mark.parametrize('url', TAKEN)
def test_taken(url: str) -> None:
    assert check_image(url) == url


@pytest.mark.parametrize(('url', 'reason'), REFUSED)
def test_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        check_image(url)
    assert 'hunter2' not in str(refused.value)


@given(st.text(alphabet=st.characters(exclude_categories=())) | st.text().map('http://'.__add__))
def test_a_url_is_taken_or_refused_and_nothing_else(url: str) -> None:
    try:
        taken = check_image(url)
    except ValueError:
        return
    taken.encode()  # it is hashed for a file name


def test_what_a_url_pins() -> None:
    assert pinned('http://host/x?y=z') == ('http://host/x?y=z', None)
    assert pinned('http://host/x#') == ('http://host/x', None)
    assert pinned(f'http://host/x?y=z#sha256={SUM}') == ('http://host/x?y=z', SUM)
    assert pinned(f'http://host/x#SHA256={SUM.upper()}') == ('http://host/x', SUM)


@pytest.mark.parametrize(
    ('line', 'found'),
    [
        (f'{SUM}  disk.img', SUM),
        (f'{SUM} *disk.img', SUM),
        (f'{SUM.upper()}  ./disk.img\r', SUM),
        (f'SHA256 (disk.img) = {SUM}', SUM),
        (f'{SUM}  other.img', None),
        (f'{SUM}  sub/disk.img', None),
        (f'{SUM}', None),
        (f'{SUM[1:]}  disk.img', None),
        (f'SHA1 (disk.img) = {SUM[:40]}', None),
        ('<html>disk.img</html>', None),
        ('', None),
    ],
)
def test_what_a_list_of_sums_says(line: str, found: str | None) -> None:
    assert sum_of(line, 'http://host/a/disk.img?x=/y') == found
    assert sum_of(f'# sums\n{OTHER}  another.img\n{line}\n', 'http://host/a/disk.img') == found


def test_a_name_with_a_space_is_found_in_the_sums() -> None:
    assert sum_of(f'{SUM}  a disk.img', 'http://host/a%20disk.img') == SUM
    assert sum_of(f'{SUM}  ', 'http://host/') is None
