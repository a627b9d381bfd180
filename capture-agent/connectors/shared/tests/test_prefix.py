"""The chain of keys: the same as the registry's, whatever the order in which keys are asked for."""

from __future__ import annotations

import unittest
from hashlib import sha256

from pf_connector.prefix import Chain, ladder, root


class Keys(unittest.TestCase):
    def test_the_chain_is_the_one_of_the_registry(self) -> None:
        # The tests of schema/src/prefix.rs have the same digest.
        tokens = [i * 1_000_003 % 151_936 for i in range(40)]
        chain = Chain(root(sha256(b"deployment").digest(), "tenant", "lora"), tokens)
        self.assertEqual(chain.key(40).hex(), "e7dbd26b651e5936c22c756975acbf6647130250a7186b2c763d8bd5866be955")

    def test_keys_do_not_depend_on_the_order_of_questions(self) -> None:
        tokens = list(range(5000))
        start = root(bytes(32), "", None)
        lengths = [0, 1, 15, 16, 17, 1024, 1025, 4999, 5000]
        expected = [Chain(start, tokens).key(length) for length in lengths]
        chain = Chain(start, tokens)
        self.assertEqual([chain.key(length) for length in reversed(lengths)], list(reversed(expected)))
        self.assertEqual([chain.key(length) for length in lengths], expected)
        self.assertEqual(len(set(expected)), len(lengths))
        self.assertEqual(Chain(start, tokens[:1025]).key(1025), expected[6], "later tokens do not matter")

    def test_salt_and_adapter_are_part_of_it(self) -> None:
        roots = [root(bytes(32), salt, adapter) for salt, adapter in (("", None), ("", ""), ("s", None), ("", "s"))]
        self.assertEqual(len(set(roots)), 4)

    def test_what_is_no_token_and_too_few_tokens_are_errors(self) -> None:
        start = root(bytes(32), "", None)
        with self.assertRaises(OverflowError):
            Chain(start, [-1] * 16).key(16)
        with self.assertRaises(ValueError):
            Chain(start, [1] * 16).key(32)

    def test_the_ladder_doubles(self) -> None:
        self.assertEqual(list(ladder(100)), [16, 32, 64])
        self.assertEqual(list(ladder(0)), [])


if __name__ == "__main__":
    unittest.main()
