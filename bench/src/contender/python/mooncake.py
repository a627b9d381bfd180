from mooncake.store import MooncakeDistributedStore


def connect(port, segment, master):
    store = MooncakeDistributedStore()
    # Without a metadata server: segments are found by their addresses.
    code = store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"mooncake: setup failed with {code}")
    return store


class Mooncake:
    """Puts and gets without a copy: the shared memory is registered."""

    def __init__(self, halves, port, master):
        self.halves = halves
        self.store = connect(port, 0, master)
        for half in halves:
            code = self.store.register_buffer(half.address, len(half.memory))
            if code != 0:
                raise SystemExit(f"mooncake: register_buffer failed with {code}")

    def put(self, half, names, lens):
        places = [half.address + offset for offset in half.offsets(lens)]
        codes = self.store.batch_put_from(names, places, lens)
        if any(codes):
            raise RuntimeError(f"batch_put_from answered {set(codes)}")

    def get(self, half, names, lens):
        places = [half.address + offset for offset in half.offsets(lens)]
        found = self.store.batch_get_into(names, places, lens)
        if list(found) != lens:
            raise RuntimeError(f"batch_get_into answered {set(found)}")


if sys.argv[1] == "owner":
    # The process whose memory holds everything, until standard input ends.
    owner = connect(sys.argv[2], int(sys.argv[4]), sys.argv[3])
    answer(done=0)
    sys.stdin.read()
    owner.close()
else:
    serve(Mooncake([Half(path) for path in sys.argv[1:3]], *sys.argv[3:5]))
