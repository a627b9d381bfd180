import select

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch  # noqa: F401  the extension needs its libraries
from lmcache.lmcache_fs import LMCacheFSClient


class LMCache:
    """The client behind the adapter `fs_native`, with the adapter's own settings."""

    def __init__(self, halves, directory):
        self.halves = halves
        self.client = LMCacheFSClient(directory, 4, "", False, 0)
        self.poll = select.poll()
        self.poll.register(self.client.event_fd(), select.POLLIN)

    def run(self, submit, half, names, lens):
        view = memoryview(half.memory)
        views = [view[offset : offset + length] for offset, length in zip(half.offsets(lens), lens)]
        # As the adapter names them: model, rank, object group, digest of the chunk.
        keys = [f"bench@00000000@0@{name.removeprefix('sha256:')}" for name in names]
        task = submit(keys, views)
        while True:
            if not self.poll.poll(60_000):
                raise RuntimeError("no answer in a minute")
            for done, good, words, each in self.client.drain_completions():
                if done == task:
                    if not good or not all(each or [True]):
                        raise RuntimeError(f"lmcache failed: {words}")
                    return

    def put(self, half, names, lens):
        self.run(self.client.submit_batch_set, half, names, lens)

    def get(self, half, names, lens):
        self.run(self.client.submit_batch_get, half, names, lens)


serve(LMCache([Half(path) for path in sys.argv[1:3]], sys.argv[3]))
