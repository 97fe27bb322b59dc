"""Everything that is not the paper's method: how episodes run fast, how files stay safe, how it is shown.

Nobody has to open this package to understand or change the method, which is in the files at the root.
Those may import from here; nothing in here imports from them.

    machine, engine, lanes, robots    devices, many episodes at once, brax's physics as fast as it gets
    conditioned, mlp                  what a model is and may know; one without memory
    layers, attention                 a Transformer's parts
    optimiser, muon, gradients        how a model is moved, with large batches
    streams                           where randomness comes from
    files, runs, shards, minari       what is on disk, and how it gets there whole or not at all
    config, presets.toml, driver      settings, and the loop around every search and training
    options, plans, estimate          options of commands, the plan of a run, and what it would cost
    reproduction                      all that has to be made for the tables and figures
    overview, plots, report           figures, tables beside the paper's (paper.json)
    viewer, server, pictures          robots in a browser, live there on demand, and without one
    demand                            what asking for a behaviour tells, writes and serves
    pretrained                        a model that is handed on, and its card
"""
