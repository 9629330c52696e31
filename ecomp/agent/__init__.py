"""The compute agent, ecompute: makes its host match the requests for it.

`instance` carries out the tasks of one instance, `host` watches the host, `queue` takes queued requests, `images` has
the base volumes. The modules here are the loop that uses them.

The list names each thread, the state that it owns, what else may change this state, and how the thread ends. Only one
thread at a time handles an instance. Before it exits, ecompute waits for the threads that are "joined" or "waited for".

    main                      tends the worker processes (Workers), which take jobs from other threads under a lock;
                              signals set flags and wake it. Ends last, after the threads that are joined
    planner                   reads requests, plans and starts tasks. Owns the Planner, except for what is in flight or
                              deferred. Planning stops at a signal, and while read-only. Waited for
    task                      carries out one task of an instance. Owns the instance and its record while it does; the
                              planner gets the result by a queue. Waited for
    confirm                   queries placement for a build's claim, while the build prepares. Ends with the answer
    checks                    makes periodic checks of claims (ClaimKeeper), the provider (Registration), this host
                              (Upkeep, under a lock), user-data, and the key of the host name, which it owns. Not waited
                              for
    troubles                  checks what keeps the host from building (Troubles, under a lock). Not waited for
    presence                  keeps /computes/<compute>, and the keys beside it, on their lease (Presence). Joined
    follow /hosts/            follows the requests of this compute, queues, presence keys and audits; callbacks set a
                              flag, or replace a state under a lock. Joined
    audits                    answers audits (Upkeep, under a lock). Waited for
    known etcd                writes <state>/etcd.json (KnownEtcd); other threads leave a value for it. Joined
    queues                    with `queues: True`: takes from the queues; owns the Taker and its deferrals. Waited for
    metrics                   with `metrics:` writes that file (MetricsWriter), from what others count. Not waited for
    libvirt-events            libvirt's event loop, here and in each worker; callbacks only wake. Ends with the process
    libvirt-open              opens a connection to libvirtd, here and in each worker. Ends when libvirtd answers
    libvirt-reopen            reopens a lost connection. Ends when the connection is closed
    to a worker               writes jobs from a queue into the pipe of one worker. Ends with that worker
    scrub                     verifies base volumes (Scrubber). Joined
    boot                      with --boot: gives a fake guest its address and its report. Not waited for
    libvirt-ask               asks a guest's agent for addresses, or QEMU for the usage of guests; in a worker: asks one
                              guest to shut down. Ends with the answer
    ending_N                  in a worker: stops guests, and writes to its pipe under a lock. Joined when the pipe ends
    question                  in a worker: asks a server about a cached image. Ends with the answer, or after 10 s
    progress                  in the program that downloads an image: reports what it has. Ends with the program
    etcd                      connects to a member of etcd, for the first thread that needs it. Ends once connected
    Thread-N                  not ours: watchdog's, which watches for .ready files
"""
