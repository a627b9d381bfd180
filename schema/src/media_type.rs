//! Media types.

/// A flat page manifest, the interchange form ([`crate::flat`]).
pub const FLAT_MANIFEST: &str = "application/vnd.pf.page-manifest.v1+json";
/// A page chunk ([`crate::run`]).
pub const RUN: &str = "application/vnd.pf.page-run.v1";
/// A page tree ([`crate::tree`]).
pub const TREE: &str = "application/vnd.pf.page-tree.v1+json";
/// A hybrid checkpoint ([`crate::checkpoint`]).
pub const CHECKPOINT: &str = "application/vnd.pf.checkpoint.v1+json";
/// A snapshot's configuration ([`crate::snapshot`]).
pub const CONFIG: &str = "application/vnd.pf.snapshot.config.v1+json";
/// The `artifactType` of a snapshot.
pub const SNAPSHOT: &str = "application/vnd.pf.snapshot.v1+json";
/// The OCI image manifest that a snapshot is.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An OCI index: a list of manifests.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Docker's image manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker's index.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Token ids, `u32` little-endian, in order.
pub const TOKENS: &str = "application/vnd.pf.tokens.v1";
/// The highest logits of the step at the boundary: JSON of [`crate::engine::Oracle`].
pub const ORACLE: &str = "application/vnd.pf.oracle.v1+json";
/// How the ranks of an engine shared the state ([`crate::shards`]).
pub const SHARDS: &str = "application/vnd.pf.shards.v1+json";
/// The `artifactType` of an export ([`crate::export`]).
pub const EXPORT: &str = "application/vnd.pf.export.v1+json";
/// A pack ([`crate::pack`]) as a layer of an export.
pub const PACK: &str = "application/vnd.pf.pack.v1";
/// OCI's empty configuration.
pub const EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// Opaque bytes.
pub const OCTETS: &str = "application/octet-stream";
/// A stream of frames ([`crate::frame`]) as an HTTP body.
pub const FRAMES: &str = "application/vnd.pf.frames.v1";
/// Where frames lie on the storage, for clients that fetch them there: JSON of
/// [`crate::api::FrameLocations`].
pub const FRAME_LOCATIONS: &str = "application/vnd.pf.frame-locations.v1+json";
