# Completions of pf for bash. Load them by `source <(pf completions bash)`.
_pf_complete() {
    # readline ends words at `:` and `=`, in the middle of references. Here they end at blanks.
    local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n' words ends='' start='' word candidate
    read -ra words <<<"$line"
    [[ $line == *[[:blank:]] ]] && words+=('')
    word=${words[${#words[@]} - 1]}
    # readline replaces only the part after the last end of a word, as it sees them.
    [[ $COMP_WORDBREAKS == *:* ]] && ends+=:
    [[ $COMP_WORDBREAKS == *=* ]] && ends+='='
    [[ -n $ends ]] && start=${word%"${word##*["$ends"]}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$start"}")
    done < <(PF_COMPLETE=bash pf -- "${words[@]}" 2>/dev/null)
    # A repository is followed by its tag, a folder by a file.
    [[ ${#COMPREPLY[@]} -ne 1 || ${COMPREPLY[0]} != *[:=/] ]] || compopt -o nospace 2>/dev/null
}
complete -o bashdefault -F _pf_complete pf
