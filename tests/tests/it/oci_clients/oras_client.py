"""The client `oras` of Python against a registry: push, pull, attach, list, chunks, delete.

oras_client.py HOST:PORT TOKEN READER: READER is a token that may only pull. Ends with an error if
anything differs from what it should be.
"""

import os
import sys

import oras.client
import oras.oci

REPOSITORY = "team/notes"


def client(address: str, token: str | None) -> oras.client.OrasClient:
    # With the backend `token` it would ask a token service, which a registry of pf does not have.
    made = oras.client.OrasClient(hostname=address, insecure=True, auth_backend="basic")
    if token:
        made.auth.set_basic_auth("any", token)
    return made


def push(by: oras.client.OrasClient, target: str, file: str, **options: object) -> int:
    return by.push(target=target, files=[file], disable_path_validation=True, quiet=True, **options).status_code


def refused(by: oras.client.OrasClient, target: str, reason: str) -> None:
    try:
        push(by, target, "notes.md:text/markdown")
    except ValueError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"{target} was pushed")


def main(address: str, token: str, reader: str) -> None:
    writer = client(address, token)
    one, large = f"{address}/{REPOSITORY}:1", f"{address}/{REPOSITORY}:large"
    with open("notes.md", "w") as file:
        file.write("# notes\n")
    with open("large", "wb") as file:
        file.write(os.urandom(5 << 20))
    assert push(writer, one, "notes.md:text/markdown", manifest_annotations={"a": "b"}) == 201
    assert push(writer, large, "large:application/x-large", do_chunked=True, chunk_size=2_000_000) == 201
    for target, name in ((one, "notes.md"), (large, "large")):
        for by in (writer, client(address, reader)):
            (pulled,) = by.pull(target=target, outdir="out", overwrite=True)
            with open(pulled, "rb") as left, open(name, "rb") as right:
                assert left.read() == right.read(), name
    assert writer.get_tags(one) == ["1", "large"]

    # Attach: a second artifact whose subject is the first.
    url = f"http://{address}/v2/{REPOSITORY}"
    manifest = writer.do_request(f"{url}/manifests/1", "GET")
    digest = manifest.headers["docker-content-digest"]
    subject = oras.oci.Subject(manifest.headers["content-type"], digest, len(manifest.content))
    assert push(writer, f"{address}/{REPOSITORY}:attached", "notes.md:text/plain", subject=subject) == 201
    (referrer,) = writer.do_request(f"{url}/referrers/{digest}", "GET").json()["manifests"]
    attached = writer.do_request(f"{url}/manifests/attached", "GET")
    assert attached.headers["docker-content-digest"] == referrer["digest"]
    assert attached.json()["subject"]["digest"] == digest

    assert writer.delete_tag(large, "large")
    assert writer.get_tags(one) == ["1", "attached"]
    refused(client(address, reader), one, "Forbidden")
    refused(client(address, token[:-1] + ("0" if token[-1] != "0" else "1")), one, "an access token is needed")
    refused(writer, f"{address}/other/notes:1", "does not exist")


main(*sys.argv[1:])
