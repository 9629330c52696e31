"""ecompute's use cases: what it has, what it is asked for, and the difference carried out.

`instance` carries out one instance, `host` looks after the host, `queue` takes from the queues, `images` has the base
volumes; here is the loop that uses them.

The threads of an ecompute, by name: what each does, whose state that is and who else may touch it, and how it ends. All
are the process's: of `--count` computes there are no more of them, only more of those with a number (turns.Threads says
how many at most). What is one compute's, or one instance's, is done by one of them at a time.

    main                      starts, hears and buries the worker processes (Workers); others hand jobs in, under its
                              lock. A signal sets flags here and wakes it. Ends last, and waits for all that is joined
    turns                     keeps the time: begins what is to be looked at again now (Threads). Told to end at the end
                              (Threads.close()), as all of the numbered ones are that are not waited for
    planner_N                 lists, plans and begins tasks: what Planner knows is its own, but for what is in work and
                              put off. A compute's plans end, for good, at a signal or where it becomes read-only.
                              Widens offers (Offers)
    build_N                   carries out a build; one instance is one thread's at a time, and its record with it. What
                              was done goes to the planner by a queue. What is in work is waited for at the end
    confirm                   asks placement what the instance of one build holds, which waits for that before anything
                              is made. Ends with the answer
    task_N                    the same for all other tasks
    minute_N                  asks placement of claims (ClaimKeeper) and the provider (Registration), which nobody else
                              touches while the compute runs, and writes its host's name; one at a time. Not waited for
    presence                  keeps /computes/<compute> of all computes on their lease (Lease). Joined
    follow /hosts/            follows requests (of one compute its own), queues and who is alive, and tells: its calls
                              set a flag or hand a state over, under a lock. Joined
    follow /audit/            follows audits, and puts them into the queue of `audits_N`. Joined
    audits_N                  answers audits, by an etcd connection of their own (Answerer). Waited for
    known etcd                writes <state>/etcd.json (KnownEtcd): others leave a value there for it. Joined
    queues_N                  with `queues: True`: takes from the queues (Puller, and what it puts off). Waited for
    start_N                   with --count: registers and starts computes, some at a time. Joined when all are begun
    end_N                     the same for their ends
    libvirt-events            libvirt's event loop, here and in each worker; its calls only nudge. Ends with the process
    libvirt-open              opens a connection to libvirtd, here and in each worker. Ends when libvirtd answers
    libvirt-reopen            opens it again when it is lost. Ends when the connection is closed
    agents                    asks guests' agents for addresses; who wants them reads the last answer. Ends at close
    to a worker               writes jobs into one worker's pipe, from a queue. Ends with that worker
    scrub                     reads base volumes (Scrubber). Joined
    libvirt-ask               in a worker: asks one guest to turn itself off. Ends when its QEMU has heard it
    ending_N                  in a worker: ends a guest or turns it off, some at a time; what they tell goes into
                              the pipe under a lock. Joined when the pipe ends
    download                  in a worker: fetches one image; the job reads how far it is. Ends with the download
    etcd                      makes a connection to a member of etcd, for whoever asks it first. Ends when it is made
    Thread-N                  not ours: watchdog's, which sees .ready files
"""
