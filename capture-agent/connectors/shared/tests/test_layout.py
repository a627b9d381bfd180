"""The builders of the protocol's layouts."""

from __future__ import annotations

import unittest
from typing import Any

from pf_connector.layout import add_dtype


class Dtype(unittest.TestCase):
    def test_a_type_is_named_only_if_the_protocol_has_a_name_for_it(self) -> None:
        for dtype, expected in (("torch.bfloat16", {"dtype": "bf16"}), ("torch.float4_e2m1fn_x2", {}), (None, {})):
            group: dict[str, Any] = {}
            add_dtype(group, dtype)
            self.assertEqual(group, expected)


if __name__ == "__main__":
    unittest.main()
