//! Downloads of frames.

use crate::digest::Digest;
use serde::{Deserialize, Serialize};

api! {
    /// Blobs to send.
    #[serde(deny_unknown_fields)]
    pub struct FramesRequest {
        /// In the order in which they are to come.
        #[cfg_attr(feature = "openapi", schema(max_items = 100_000))]
        pub digests: Vec<Digest>,
    }

    /// Where the frames that were asked for lie: together, in this order, they are the stream
    /// without its end mark.
    pub struct FrameLocations {
        /// Seconds after which the URLs are refused. Ask again then.
        pub expires_seconds: u64,
        /// Ranges of objects.
        pub extents: Vec<FrameExtent>,
    }

    /// Frames that lie back to back.
    pub struct FrameExtent {
        /// Where to `GET` them, without the registry's token. Any holder of the URL can read the
        /// object.
        pub url: String,
        /// First byte, for `Range`.
        pub offset: u64,
        /// Bytes.
        pub length: u64,
        /// The blobs, in order. The reader verifies each.
        pub digests: Vec<Digest>,
    }
}
