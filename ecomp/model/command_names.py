"""The names of eschedule's commands, made from their rows by `python -m docs.generate`. Pure."""

BY_MODULE = {
    'create': ('create',),
    'apply': ('apply',),
    'inspect': ('query', 'list', 'show', 'why', 'wait', 'stack', 'ui'),
    'history': ('events',),
    'enter': ('ssh', 'console', 'log'),
    'change': ('destroy', 'stop', 'start', 'reboot', 'protect', 'unprotect', 'resize', 'rename', 'rebuild'),
    'sharing': ('flavor', 'flavor set', 'flavor delete', 'image', 'group', 'quota', 'quota set'),
    'operators': ('hosts', 'host drain', 'host enable', 'host forget', 'evacuate'),
    'adopt': ('adopt', 'release'),
    'top': ('top',),
    'check': ('check',),
    'commands': ('help', 'completion'),
}
"""The names by the module of ecomp/cli that has their rows, in the order of the help."""

RESERVED = frozenset({
    'adopt', 'again', 'apply', 'audit', 'check', 'clear', 'completion', 'console', 'copy', 'create', 'destroy',
    'doctor', 'evacuate', 'events', 'exec', 'flavor', 'group', 'help', 'host', 'hosts', 'image', 'list', 'log', 'logs',
    'metrics', 'migrate', 'move', 'plan', 'protect', 'query', 'quota', 'reboot', 'rebuild', 'release', 'rename',
    'resize', 'results', 'run', 'set', 'show', 'snapshot', 'ssh', 'ssh-config', 'stack', 'start', 'stop', 'timeline',
    'top', 'ui', 'unprotect', 'version', 'wait', 'what-if', 'why',
})
"""The first arguments of commands, also of planned ones: no instance may have such a name."""
