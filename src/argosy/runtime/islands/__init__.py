"""Islands at run time: groups of processes that train on their own and exchange parameters now and then."""
