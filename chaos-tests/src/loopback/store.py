"""One end of a Mooncake Store: a seed that offers objects from its memory, or a receiver that gets them.

store.py seed|receive HOST MASTER SIZE OBJECT BATCH

Both say "ready" when they are; the receiver begins at a line on its standard input, says "done" when it has all of it,
and both stay until their input ends.
"""
import ctypes
import mmap
import sys

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20


def fail(what, code):
    sys.exit(f"Mooncake Store: {what} failed with code {code}")


def main():
    role, host, master, size, object_bytes, batch = sys.argv[1:]
    size, object_bytes, batch = int(size), int(object_bytes), int(batch)
    store = MooncakeDistributedStore()
    # The segment is what this end offers: all of it on the seed, and nothing, nearly, on the receiver. It is cut into
    # slabs, so that it must be larger than what is in it.
    segment = size + size // 4 + 64 * MIB if role == "seed" else 0
    code = store.setup(host, "P2PHANDSHAKE", segment, 64 * MIB, "tcp", "", master)
    if code != 0:
        fail("setup", code)
    memory = mmap.mmap(-1, size)
    if role == "seed":
        memory.write(b"\x5a" * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = store.register_buffer(start, size)
    if code != 0:
        fail("register_buffer", code)
    objects = [
        (f"object-{at}", start + at, min(object_bytes, size - at)) for at in range(0, size, object_bytes)
    ]
    if role == "seed":
        for key, address, length in objects:
            code = store.put_from(key, address, length)
            if code != 0:
                fail(f"put_from of {key}", code)
    print("ready", flush=True)
    if role == "receive":
        sys.stdin.readline()
        for first in range(0, len(objects), batch):
            keys, addresses, lengths = zip(*objects[first : first + batch])
            got = store.batch_get_into(list(keys), list(addresses), list(lengths))
            if list(got) != list(lengths):
                fail(f"batch_get_into of {keys}", got)
        print("done", flush=True)
    sys.stdin.read()
    if role == "receive" and memory[:] != b"\x5a" * size:
        sys.exit("Mooncake Store: what was received is not what was sent")


main()
