"""One process per node that has imported all a shim needs, and forks from itself what a call of the binary asks for.

client.c         asks it; in C, because it runs twice per container
place.py         where the one of this very installation listens
server.py        is it
process_context.py makes the forked process what the client is: cgroup, limits, environment, cookie, stdio
answer.py        does in the forked process what the client asked for
"""
