// The integer inputs of a step: copied, then checked, before the tape runs over them.
#include <algorithm>

#include "sizes.h"
#include "tape.h"

namespace wager {

namespace {

void require(bool ok, const char* what, int at, int value, const char* why = "outside the tape's buffers") {
    if (!ok) {
        throw std::out_of_range(std::string(what) + " is " + std::to_string(value) + " at index " + std::to_string(at) +
                                ", " + why);
    }
}

}  // namespace

void Tape::check_row(int row, int sequences) const {
    const int sequence = in_.seq_ids[row], position = in_.positions[row];
    require(sequence >= 0 && sequence < sequences, "seq_ids", row, sequence);
    require(in_.tokens[row] >= 0 && in_.tokens[row] < vocab_, "tokens", row, in_.tokens[row]);
    require(position >= 0 && position < positions_ && position / kBlockSize < in_.max_blocks, "positions", row, position);
    const int first = in_.query_start_loc[sequence], end = in_.query_start_loc[sequence + 1];
    require(row >= first, "query_start_loc", sequence, first, "past a row of its sequence");
    check_path(row);
    require(row < end, "query_start_loc", sequence + 1, end, "not a row of its sequence");
}

// A path is followed from row to row and its keys are ordered by position, so each parent must be one position before.
void Tape::check_path(int row) const {
    const int sequence = in_.seq_ids[row], position = in_.positions[row], parent = in_.parents[row];
    require(parent >= -1 && parent < row, "parents", row, parent);
    if (parent < 0) {
        const int start = in_.num_computed_tokens[sequence];
        require(position == start, "positions", row, position, "not the base of its sequence");
        return;
    }
    require(in_.seq_ids[parent] == sequence, "parents", row, parent, "a row of another sequence");
    require(position == in_.positions[parent] + 1, "positions", row, position, "not one past its parent's");
}

// Row j of a sequence's span (of a tree, too) is cached at index num_computed_tokens + j of the sequence's block table. A
// slot elsewhere would overwrite what another sequence has cached, and so would a block that two sequences write to.
void Tape::check_slot(int row, int sequences) {
    const int sequence = in_.seq_ids[row], first = in_.query_start_loc[sequence], slot = in_.slot_mapping[row];
    const int at = in_.num_computed_tokens[sequence] + row - first, index = at / kBlockSize, offset = at % kBlockSize;
    require(index < in_.max_blocks, "slot_mapping", row, slot, "past the end of its sequence's block table");
    const int block = block_table(sequence)[index];
    require(block >= 0 && block < num_blocks_, "block_tables", index, block);
    if (slot != int64_t{block} * kBlockSize + offset) {
        const std::string wanted = std::to_string(int64_t{block} * kBlockSize + offset);
        const std::string why = "not " + wanted + " (entry " + std::to_string(index) + " of the block table of sequence " +
                                std::to_string(sequence) + " is block " + std::to_string(block) + ", offset " +
                                std::to_string(offset) + ")" + sequence_of(slot < 0 ? -1 : slot / kBlockSize, sequences);
        require(false, "slot_mapping", row, slot, why.c_str());
    }
    if (writers_.empty() || (row > first && offset > 0)) return;
    Writer& writer = writers_[block];
    if (writer.run == runs_) {
        const std::string why = "in block " + std::to_string(block) + ", which sequence " + std::to_string(writer.sequence) +
                                " writes to in the same step";
        require(false, "slot_mapping", row, slot, why.c_str());
    }
    writer = {runs_, sequence};
}

// "; block b belongs to sequence s" for the first sequence that has the block in the part of its table that it uses.
std::string Tape::sequence_of(int block, int sequences) const {
    for (int s = 0; s < sequences; ++s) {
        const int end = in_.num_computed_tokens[s] + in_.query_start_loc[s + 1] - in_.query_start_loc[s];
        for (int i = 0; i < in_.max_blocks && i * kBlockSize < end; ++i)
            if (block_table(s)[i] == block)
                return "; block " + std::to_string(block) + " belongs to sequence " + std::to_string(s);
    }
    return "";
}

void Tape::check_logits_indices(int rows, int logits_rows) const {
    for (int i = 0; i < logits_rows; ++i) {
        const int row = in_.logits_indices[i];
        require(row >= 0 && row < rows, "logits_indices", i, row);
    }
}

// Copied first: another thread may write to the caller's buffers between the checks and the run.
void Tape::copy_inputs(int rows, int sequences, int logits_rows) {
    require(rows >= 0 && rows <= in_.max_rows, "rows", 0, rows);
    require(sequences >= 0 && sequences <= in_.max_sequences, "sequences", 0, sequences);
    require(logits_rows >= 0 && logits_rows <= in_.max_rows, "logits_rows", 0, logits_rows);
    int32_t* to = storage_.data();
    const auto copy = [&](const int32_t* from, int n, int room) {
        int32_t* const at = to;
        std::copy_n(from, n, at);
        to += room;
        return at;
    };
    in_.tokens = copy(source_.tokens, rows, in_.max_rows);
    in_.positions = copy(source_.positions, rows, in_.max_rows);
    in_.parents = copy(source_.parents, rows, in_.max_rows);
    in_.slot_mapping = copy(source_.slot_mapping, rows, in_.max_rows);
    in_.seq_ids = copy(source_.seq_ids, rows, in_.max_rows);
    in_.logits_indices = copy(source_.logits_indices, logits_rows, in_.max_rows);
    in_.query_start_loc = copy(source_.query_start_loc, sequences + 1, in_.max_sequences + 1);
    in_.num_computed_tokens = copy(source_.num_computed_tokens, sequences, in_.max_sequences);
    in_.block_tables = to;
    for (int s = 0; s < sequences; ++s) {  // of each table the entries that its sequence can use
        const int64_t end = (int64_t{in_.num_computed_tokens[s]} + rows) / kBlockSize + 1;
        const int n = static_cast<int>(std::clamp<int64_t>(end, 0, in_.max_blocks));
        copy(source_.block_tables + static_cast<size_t>(s) * in_.max_blocks, n, in_.max_blocks);
    }
}

void Tape::check(int rows, int sequences, int logits_rows) {
    const int32_t* starts = in_.query_start_loc;
    for (int s = 0; s < sequences; ++s) {
        require(in_.num_computed_tokens[s] >= 0, "num_computed_tokens", s, in_.num_computed_tokens[s]);
        require(starts[s] >= 0 && starts[s] < rows, "query_start_loc", s, starts[s]);
    }
    require(starts[sequences] == rows, "query_start_loc", sequences, starts[sequences], "not the number of rows");
    ++runs_;
    int checked = -1, blocks = 0;  // entries of the block table already seen, of the sequence before
    for (int row = 0; row < rows; ++row) {
        check_row(row, sequences);
        const int sequence = in_.seq_ids[row];
        if (sequence != checked) blocks = 0;
        checked = sequence;
        const int32_t* table = block_table(sequence);
        for (; blocks <= in_.positions[row] / kBlockSize; ++blocks)
            require(table[blocks] >= 0 && table[blocks] < num_blocks_, "block_tables", blocks, table[blocks]);
        check_slot(row, sequences);
    }
    for (int s = 0; s < sequences; ++s)
        require(in_.seq_ids[starts[s]] == s, "query_start_loc", s, starts[s], "not a row of its sequence");
    check_logits_indices(rows, logits_rows);
}

}  // namespace wager
