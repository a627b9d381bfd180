"""Checks checkpoint-vectors.json against docs/checkpoint-abi.md.

Uses Python's standard library only.
"""
import fractions, hashlib, itertools, json, math, struct, sys

FLOATS = {"f64": (11, 52, 1), "f32": (8, 23, 1), "f16": (5, 10, 1), "bf16": (8, 7, 1), "fp8e4m3": (4, 3, 0), "fp8e5m2": (5, 2, 1)}
SIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "fp8e4m3": 1, "fp8e5m2": 1, "bool": 1,
         **{s + str(8 * n): n for s in "iu" for n in (1, 2, 4, 8)}}
LIMIT = 64 << 30


class Refused(Exception):
    pass


def meaning(dtype, bits):
    """("nan",) | ("inf", sign) | (number, sign)"""
    if dtype not in FLOATS:
        if dtype == "bool" and bits > 1:
            raise Refused("inexact_storage")
        if dtype[0] == "i" and bits >> (8 * SIZES[dtype] - 1):
            bits -= 1 << (8 * SIZES[dtype])
        return fractions.Fraction(bits), int(bits < 0)
    e, f, infinities = FLOATS[dtype]
    sign, field, fraction = bits >> (e + f), bits >> f & ((1 << e) - 1), bits & ((1 << f) - 1)
    if field == (1 << e) - 1 and infinities:
        return ("nan",) if fraction else ("inf", sign)
    if field == (1 << e) - 1 and fraction == (1 << f) - 1:
        return ("nan",)
    scale = fractions.Fraction(2) ** (max(field, 1) - ((1 << (e - 1)) - 1) - f)
    return (fraction + ((1 << f) if field else 0)) * scale * (-1 if sign else 1), sign


def integer_bits(dtype, value):
    size = 8 * SIZES[dtype]
    low, high = (0, 1) if dtype == "bool" else (0, (1 << size) - 1) if dtype[0] == "u" else (-(1 << (size - 1)), (1 << (size - 1)) - 1)
    number, sign = value if len(value) == 2 else (None, 0)
    if not isinstance(number, fractions.Fraction) or number.denominator != 1 or not low <= number <= high or (sign and not number):
        raise Refused("inexact_storage")
    return int(number) & ((1 << size) - 1)


def bits_of(dtype, value):
    if dtype not in FLOATS:
        return integer_bits(dtype, value)
    e, f, infinities = FLOATS[dtype]
    if value == ("nan",):
        return ((1 << e) - 1) << f | 1 << (f - 1) if infinities else (1 << (e + f)) - 1
    number, sign = value
    if number == "inf":
        candidate = ((1 << e) - 1) << f if infinities else None
    elif number == 0:
        candidate = 0
    else:
        # Positive patterns ascend with the number they mean: search for the one that means it.
        low, candidate = 0, (1 << (e + f)) - 1
        while low < candidate:
            middle = (low + candidate + 1) // 2
            found = meaning(dtype, middle)
            low, candidate = (middle, candidate) if found[0] not in ("nan", "inf") and found[0] <= abs(number) else (low, middle - 1)
    if candidate is None or meaning(dtype, candidate)[0] not in ("inf", abs(number) if number != "inf" else "inf"):
        raise Refused("inexact_storage")
    return candidate | sign << (e + f)


def value_hash(case):
    payload, kind, logical, storage = bytes.fromhex(case["payload"]), case["kind"], case["logical_dtype"], case["storage_dtype"]
    shape, layout = case["shape"], case["layout"]
    if "strides" not in layout:
        shape, logical, storage, layout = [len(payload)], "u8", "u8", {"strides": [1], "offset": 0}
    if math.prod(shape) * SIZES[logical] > LIMIT:
        raise Refused("too_large")
    strides, offset, size = layout["strides"], layout["offset"], SIZES[storage]
    if len(strides) != len(shape):
        raise Refused("invalid_document")
    out = b"pfv1\n%s\n%s\n" % (kind.encode(), logical.encode()) + struct.pack("<I%dQ" % len(shape), len(shape), *shape)
    for index in itertools.product(*map(range, shape)):
        at = offset + sum(i * s for i, s in zip(index, strides))
        if not 0 <= at < len(payload) // size:
            raise Refused("invalid_document")
        value = meaning(storage, int.from_bytes(payload[at * size:(at + 1) * size], "little"))
        out += bits_of(logical, value).to_bytes(SIZES[logical], "little")
    return "pfv1:sha256:" + hashlib.sha256(out).hexdigest()


wrong = 0
for case in json.load(open(sys.argv[1], encoding="utf-8"))["cases"]:
    try:
        found = {"payload_hash": "sha256:" + hashlib.sha256(bytes.fromhex(case["payload"])).hexdigest(), "value_hash": value_hash(case)}
    except Refused as refused:
        found = {"error": str(refused)}
    if found != case["expected"]:
        wrong += 1
        print(case["name"], "expected", case["expected"], "found", found, file=sys.stderr)
sys.exit(wrong != 0)
