"""The compute agent, ecompute: makes its host match the requests for it.

`instance` carries out the tasks of one instance, `host` watches the host, `queue` takes queued requests, `images` has
the base volumes. The modules here are the loop that uses them.

The list names each thread, the state that it owns, what else may change this state, and how the thread ends. All
computes of the process (`--count`) share the threads; jobs.Threads limits the numbered ones. Only one thread at a time
handles a compute or an instance. Before it exits, ecompute waits for the threads that are "joined" or "waited for".

    main                      tends the worker processes (Workers), which take jobs from other threads under a lock;
                              signals set flags and wake it. Ends last, after the threads that are joined
    timer                     starts scheduled jobs when due (Threads). Ends, as numbered threads, at Threads.close()
    planner_N                 reads requests, plans and starts tasks. Owns the Planner, except for what is in flight or
                              deferred. Planning stops at a signal, and while read-only
    build_N                   carries out a build. Owns the instance and its record while it does; passes the result to
                              the planner by a queue. Builds in flight are waited for at the end
    confirm                   queries placement for a build's claim, while the build prepares. Ends with the answer
    task_N                    like build_N, for all other tasks
    minute_N                  makes periodic checks of claims (ClaimKeeper), the provider (Registration), what keeps the
                              host from building (Troubles, under a lock) and the key of the host name, which it owns
                              while the compute runs. Not waited for
    presence                  keeps /computes/<compute> of all computes on their lease (Lease). Joined
    follow /hosts/            follows requests (of a single compute only its own), queues and presence keys; callbacks
                              set a flag, or replace a state under a lock. Joined
    follow /audit/            follows audits, and passes them to `audits_N`. Joined
    audits_N                  answers audits, by an etcd connection of their own (AuditAnswerer). Waited for
    known etcd                writes <state>/etcd.json (KnownEtcd); other threads leave a value for it. Joined
    queues_N                  with `queues: True`: takes from the queues; owns the Taker and its deferrals. Waited for
    metrics_0                 with `metrics:` writes that file (MetricsWriter), from what others count. Not waited for
    start_N                   with --count: registers and starts computes concurrently. Joined when all have started
    end_N                     with --count: stops them. Joined when all have stopped
    libvirt-events            libvirt's event loop, here and in each worker; callbacks only wake. Ends with the process
    libvirt-open              opens a connection to libvirtd, here and in each worker. Ends when libvirtd answers
    libvirt-reopen            reopens a lost connection. Ends when the connection is closed
    agents                    asks guest agents for addresses; callers read the last answer. Ends at close
    to a worker               writes jobs from a queue into the pipe of one worker. Ends with that worker
    scrub                     verifies base volumes (Scrubber). Joined
    boot                      with --boot: gives a fake guest its address and its report. Not waited for
    libvirt-ask               in a worker: asks one guest to shut down. Ends when QEMU has accepted that
    ending_N                  in a worker: destroys guests or switches them off concurrently; they write to the pipe
                              under a lock. Joined when the pipe ends
    download                  in a worker: fetches one image; the job reads its progress. Ends with the download
    etcd                      connects to a member of etcd, for the first thread that needs it. Ends once connected
    Thread-N                  not ours: watchdog's, which watches for .ready files
"""
