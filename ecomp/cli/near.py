"""Which command was probably meant by a word that is none."""

from __future__ import annotations

from collections.abc import Collection

from ecomp.model.near import near

LIST, DESTROY, CREATE = 'list', 'destroy', "create 'resources=…' [IMAGE_URL]"

ELSEWHERE = {
    **dict.fromkeys(('ls', 'ps', 'dir', 'servers', 'server', 'instances', 'vms', 'get'), LIST),
    **dict.fromkeys(('delete', 'del', 'rm', 'remove', 'undefine', 'kill', 'purge', 'terminate'), DESTROY),
    **dict.fromkeys(('launch', 'new', 'boot', 'make', 'add', 'deploy'), CREATE),
    'query': "'resources=…'",
    **dict.fromkeys(('info', 'describe', 'inspect', 'status', 'dominfo'), 'show'),
    **dict.fromkeys(('computes', 'nodes', 'hypervisors', 'agents'), 'hosts'),
    **dict.fromkeys(('shutdown', 'poweroff', 'halt', 'off', 'pause'), 'stop'),
    **dict.fromkeys(('restart', 'reset'), 'reboot'),
    **dict.fromkeys(('check', 'verify', 'fsck'), 'audit'),
    **dict.fromkeys(('on', 'resume', 'up'), 'start'),
    **dict.fromkeys(('monitor', 'history', 'journal'), 'events'),
    **{'flavors': 'flavor list', 'groups': 'group list', 'quotas': 'quota list', 'man': 'help'},
}
"""What other tools, and hands that come from them, call a command of ours."""

NONE = dict.fromkeys(('image', 'images', 'img'), 'an image is a URL behind the query, and nobody keeps a list of them')
"""What others have a command for, and we have not: why there is none."""


def hint(word: str, names: Collection[str]) -> str:
    """The end of a sentence that says that a word is no command; `names` are the first words of those there are."""
    if word.lower() in NONE:
        return f': {NONE[word.lower()]}'
    close = ELSEWHERE.get(word.lower()) or near(word, names)
    return f': did you mean eschedule {close}?' if close else '; --help shows all'
